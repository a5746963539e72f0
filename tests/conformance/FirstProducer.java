import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.Map;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * A producer of Kafka 0.8, as newer clients do not speak to its brokers. A line is a topic, a codec,
 * and key and value in hexadecimal digits, or `-` for null.
 */
public class FirstProducer {
    public static void main(String[] arguments) throws Exception {
        Map<String, KafkaProducer<byte[], byte[]>> producers = new HashMap<>();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split(" ");
            KafkaProducer<byte[], byte[]> producer = producers.get(words[1]);
            if (producer == null) {
                Map<String, Object> configs = new HashMap<>();
                configs.put("bootstrap.servers", arguments[0]);
                configs.put("compression.type", words[1]);
                configs.put("acks", "all");
                configs.put("linger.ms", "20");
                producer = new KafkaProducer<>(
                    configs, new ByteArraySerializer(), new ByteArraySerializer());
                producers.put(words[1], producer);
            }
            producer.send(new ProducerRecord<>(words[0], 0, bytes(words[2]), bytes(words[3])));
        }
        for (KafkaProducer<byte[], byte[]> producer : producers.values()) {
            producer.close();
        }
    }

    private static byte[] bytes(String digits) {
        return digits.equals("-") ? null : HexFormat.of().parseHex(digits);
    }
}
