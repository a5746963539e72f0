import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.util.HexFormat;
import org.apache.kafka.common.protocol.Message;
import org.apache.kafka.common.protocol.MessageUtil;

/**
 * Kafka's own encoder of messages: a line with a name, a version and JSON in, a line with the bytes
 * and Kafka's JSON out. `test_messages.py` speaks to it.
 */
public class MessageTwin {
    private static final String[] PACKAGES = {
        "org.apache.kafka.coordinator.group.generated",
        "org.apache.kafka.coordinator.transaction.generated",
        "org.apache.kafka.coordinator.share.generated",
        "org.apache.kafka.common.metadata",
        "org.apache.kafka.common.message",
        "org.apache.kafka.server.log.remote.metadata.storage.generated",
    };

    public static void main(String[] arguments) throws Exception {
        ObjectMapper mapper = new ObjectMapper();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, "UTF-8"));
        java.io.PrintStream out = new java.io.PrintStream(System.out, false, "UTF-8");
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.split(" ", 3);
            short version = Short.parseShort(words[1]);
            Class<?> converter = find(words[0] + "JsonConverter");
            Message message = (Message) converter.getMethod("read", JsonNode.class, short.class)
                .invoke(null, mapper.readTree(words[2]), version);
            ByteBuffer data = MessageUtil.toByteBufferAccessor(message, version).buffer();
            byte[] bytes = new byte[data.remaining()];
            data.get(bytes);
            Object json = converter.getMethod("write", message.getClass(), short.class)
                .invoke(null, message, version);
            out.println(HexFormat.of().formatHex(bytes) + " " + json);
        }
        out.flush();
    }

    private static Class<?> find(String name) throws ClassNotFoundException {
        for (String place : PACKAGES) {
            try {
                return Class.forName(place + "." + name);
            } catch (ClassNotFoundException unknown) {
                continue;
            }
        }
        throw new ClassNotFoundException(name);
    }
}
