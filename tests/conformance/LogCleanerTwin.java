import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Method;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Delayed;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.server.util.Scheduler;
import org.apache.kafka.storage.internals.log.Cleaner;
import org.apache.kafka.storage.internals.log.CleanerStats;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogStartOffsetIncrementReason;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.SkimpyOffsetMap;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.utils.Throttler;
import org.apache.kafka.storage.log.metrics.BrokerTopicStats;

/**
 * Kafka's own log and cleaner, without a broker around them: a line in, a line out, and the time is
 * what the line says. `twin_kafka.py` speaks to it.
 */
public class LogCleanerTwin {
    private static final int DAY_MS = 86_400_000;

    /** A clock that stands where it was set. */
    private static final class Clock implements Time {
        private long nowMs;

        @Override
        public long milliseconds() {
            return nowMs;
        }

        @Override
        public long nanoseconds() {
            return nowMs * 1_000_000;
        }

        @Override
        public void sleep(long ms) {
            nowMs += ms;
        }
    }

    /** What is to be done once is done at once; what is to be repeated is left to the lines. */
    private static final class AtOnce implements Scheduler {
        @Override
        public void startup() {}

        @Override
        public void shutdown() {}

        @Override
        public void resizeThreadPool(int size) {}

        @Override
        public ScheduledFuture<?> schedule(String name, Runnable task, long delay, long period) {
            if (period < 0) {
                task.run();
            }
            return new Done();
        }
    }

    private static final class Done extends CompletableFuture<Void>
            implements ScheduledFuture<Void> {
        @Override
        public long getDelay(TimeUnit unit) {
            return 0;
        }

        @Override
        public int compareTo(Delayed other) {
            return 0;
        }
    }

    private final Clock clock = new Clock();
    private final Map<String, UnifiedLog> logs = new HashMap<>();
    private final LogDirFailureChannel failures = new LogDirFailureChannel(10);
    private final BrokerTopicStats topicStats = new BrokerTopicStats();
    private final Throttler throttler =
            new Throttler(Double.MAX_VALUE, Long.MAX_VALUE, "throttler", "bytes", clock);
    private final Method cleanableOffsets;

    private LogCleanerTwin() throws ReflectiveOperationException {
        Class<?> manager =
                Class.forName("org.apache.kafka.storage.internals.log.LogCleanerManager");
        cleanableOffsets =
                manager.getDeclaredMethod(
                        "cleanableOffsets", UnifiedLog.class, Optional.class, long.class);
        cleanableOffsets.setAccessible(true);
    }

    public static void main(String[] arguments) throws Exception {
        LogCleanerTwin twin = new LogCleanerTwin();
        PrintStream answers = System.out;
        System.setOut(System.err);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        answers.println("ready");
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String answer;
            try {
                answer = "ok " + twin.answer(line.split(" "));
            } catch (Exception fault) {
                Throwable cause = fault.getCause() == null ? fault : fault.getCause();
                cause.printStackTrace();
                answer = "error " + cause.toString().replace('\n', ' ');
            }
            answers.println(answer.strip());
            answers.flush();
        }
    }

    /** verb, now, name of a log, and what the verb needs. */
    private String answer(String[] words) throws Exception {
        clock.nowMs = Long.parseLong(words[1]);
        String name = words[2];
        if (words[0].equals("create")) {
            logs.put(name, create(new File(words[3]), words));
            return "";
        }
        UnifiedLog log = logs.get(name);
        switch (words[0]) {
            case "append":
                append(log, Path.of(words[3]));
                return String.valueOf(log.logEndOffset());
            case "roll":
                log.roll();
                return String.valueOf(log.activeSegment().baseOffset());
            case "start":
                log.maybeIncrementLogStartOffset(
                        Long.parseLong(words[3]),
                        LogStartOffsetIncrementReason.ClientRecordDeletion);
                log.deleteOldSegments();
                return String.valueOf(log.logStartOffset());
            case "configure":
                log.updateConfig(config(words, 3));
                return "";
            case "clean":
                return clean(log, words);
            case "forget":
                logs.remove(name).flush(true);
                return "";
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    private UnifiedLog create(File directory, String[] words) throws Exception {
        Files.createDirectories(directory.toPath());
        return UnifiedLog.create(
                directory,
                config(words, 4),
                0L,
                0L,
                new AtOnce(),
                topicStats,
                clock,
                900_000,
                new ProducerStateManagerConfig(DAY_MS, false),
                600_000,
                failures,
                true,
                Optional.of(Uuid.randomUuid()));
    }

    private static LogConfig config(String[] words, int first) {
        Map<String, String> values = new HashMap<>();
        for (int i = first; i < words.length; i++) {
            String[] pair = words[i].split("=", 2);
            values.put(pair[0], pair[1]);
        }
        return new LogConfig(values);
    }

    /** A batch is an append, as it is when it comes from its producer. */
    private static void append(UnifiedLog log, Path file) throws Exception {
        ByteBuffer buffer = ByteBuffer.wrap(Files.readAllBytes(file));
        while (buffer.hasRemaining()) {
            int size = 12 + buffer.getInt(buffer.position() + 8);
            ByteBuffer batch = buffer.slice(buffer.position(), size);
            buffer.position(buffer.position() + size);
            log.appendAsFollower(MemoryRecords.readableRecords(batch), batch.getInt(12));
        }
        log.updateHighWatermark(log.logEndOffset());
    }

    /** One round, where Kafka would do one; arguments: checkpoint, map bytes, load, buffer size. */
    private String clean(UnifiedLog log, String[] words) throws Exception {
        Optional<Long> checkpoint = Optional.of(Long.parseLong(words[3]));
        int bufferSize = Integer.parseInt(words[6]);
        log.removeExpiredProducers(clock.nowMs);
        Object offsets = cleanableOffsets.invoke(null, log, checkpoint, clock.nowMs);
        LogToClean cleanable =
                new LogToClean(
                        log,
                        number(offsets, "firstDirtyOffset"),
                        number(offsets, "firstUncleanableDirtyOffset"),
                        false);
        boolean isEligible =
                cleanable.totalBytes() > 0
                        && cleanable.cleanableRatio() > log.config().minCleanableRatio;
        String plan =
                String.join(
                        " ",
                        String.valueOf(cleanable.firstDirtyOffset()),
                        String.valueOf(number(offsets, "firstUncleanableDirtyOffset")),
                        String.valueOf(cleanable.cleanBytes()),
                        String.valueOf(cleanable.cleanableBytes()));
        if (!isEligible) {
            return "none " + plan;
        }
        Cleaner cleaner =
                new Cleaner(
                        0,
                        new SkimpyOffsetMap(Integer.parseInt(words[4]), "MD5"),
                        bufferSize,
                        64 << 20,
                        Double.parseDouble(words[5]),
                        throttler,
                        clock,
                        partition -> {});
        Map.Entry<Long, CleanerStats> result = cleaner.doClean(cleanable, clock.nowMs);
        CleanerStats stats = result.getValue();
        List<Long> figures =
                List.of(
                        stats.mapMessagesRead(),
                        stats.messagesRead(),
                        stats.messagesWritten(),
                        stats.invalidMessagesRead(),
                        stats.bytesRead(),
                        stats.bytesWritten());
        StringBuilder answer = new StringBuilder(String.valueOf(result.getKey()));
        answer.append(' ').append(plan);
        for (Long figure : figures) {
            answer.append(' ').append(figure);
        }
        return answer.toString();
    }

    private static long number(Object record, String name) throws ReflectiveOperationException {
        Method accessor = record.getClass().getDeclaredMethod(name);
        accessor.setAccessible(true);
        return (long) accessor.invoke(record);
    }
}
