import java.time.Duration;
import java.time.Instant;
import java.util.HexFormat;
import java.util.Properties;
import java.util.TreeSet;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.TestInputTopic;
import org.apache.kafka.streams.TopologyTestDriver;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.JoinWindows;
import org.apache.kafka.streams.kstream.KGroupedStream;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.SessionWindows;
import org.apache.kafka.streams.kstream.StreamJoined;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.kstream.WindowedSerdes;
import org.apache.kafka.streams.state.Stores;
import org.apache.kafka.streams.test.TestRecord;

/** What Kafka Streams writes to its topics: a line is topic, key, value (hexadecimal), timestamp. */
public class StreamsTopics {
    private static final long START = 1_700_000_000_000L;
    private static final Serde<String> TEXT = Serdes.String();

    public static void main(String[] arguments) {
        StreamsBuilder builder = new StreamsBuilder();
        KStream<String, String> left = builder.stream("left", Consumed.with(TEXT, TEXT));
        KStream<String, String> right = builder.stream("right", Consumed.with(TEXT, TEXT));
        KGroupedStream<String, String> grouped = left.groupByKey();
        grouped.count(counted("counts"));
        grouped.windowedBy(TimeWindows.ofSizeWithNoGrace(Duration.ofSeconds(10)))
            .count(counted("windows")).toStream()
            .to("windowed", Produced.with(
                WindowedSerdes.timeWindowedSerdeFrom(String.class, 10_000L), Serdes.Long()));
        grouped.windowedBy(SessionWindows.ofInactivityGapWithNoGrace(Duration.ofSeconds(5)))
            .count(counted("sessions")).toStream()
            .to("sessioned", Produced.with(
                WindowedSerdes.sessionWindowedSerdeFrom(String.class), Serdes.Long()));
        left.join(
                right,
                (one, other) -> one + other,
                JoinWindows.ofTimeDifferenceWithNoGrace(Duration.ofSeconds(3)),
                StreamJoined.<String, String, String>with(store("join-left"), store("join-right"))
                    .withKeySerde(TEXT).withValueSerde(TEXT).withOtherValueSerde(TEXT))
            .to("joined", Produced.with(TEXT, TEXT));
        Properties configs = new Properties();
        configs.put("application.id", "app");
        configs.put("bootstrap.servers", "none:1");
        configs.put("state.dir", arguments[0]);
        configs.put("default.key.serde", Serdes.StringSerde.class.getName());
        configs.put("default.value.serde", Serdes.StringSerde.class.getName());
        Instant start = Instant.ofEpochMilli(START);
        try (TopologyTestDriver driver = new TopologyTestDriver(builder.build(), configs, start)) {
            TestInputTopic<String, String> ones =
                driver.createInputTopic("left", new StringSerializer(), new StringSerializer());
            TestInputTopic<String, String> others =
                driver.createInputTopic("right", new StringSerializer(), new StringSerializer());
            ones.pipeInput("ann", "1", START);
            ones.pipeInput("b", "2", START + 1000);
            ones.pipeInput("ann", "3", START + 2500);
            others.pipeInput("ann", "x", START + 2600);
            ones.pipeInput("", "4", START + 12_000);
            ones.pipeInput("b", "5", START + 40_000);
            for (String topic : new TreeSet<>(driver.producedTopicNames())) {
                for (TestRecord<byte[], byte[]> record : driver.createOutputTopic(
                        topic, new ByteArrayDeserializer(), new ByteArrayDeserializer())
                        .readRecordsToList()) {
                    System.out.println(topic + " " + hex(record.key()) + " " + hex(record.value())
                        + " " + record.timestamp());
                }
            }
        }
    }

    private static <S extends org.apache.kafka.streams.processor.StateStore>
        Materialized<String, Long, S> counted(String name) {
        return Materialized.<String, Long, S>as(name)
            .withKeySerde(TEXT).withValueSerde(Serdes.Long());
    }

    private static org.apache.kafka.streams.state.WindowBytesStoreSupplier store(String name) {
        return Stores.inMemoryWindowStore(
            name, Duration.ofSeconds(6), Duration.ofSeconds(6), true);
    }

    private static String hex(byte[] data) {
        return data == null ? "null" : "x" + HexFormat.of().formatHex(data);
    }
}
