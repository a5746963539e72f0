import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Method;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Base64;
import java.util.Comparator;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.PriorityQueue;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Delayed;
import java.util.concurrent.ScheduledFuture;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.message.DescribeProducersResponseData;
import org.apache.kafka.common.message.FetchResponseData;
import org.apache.kafka.common.record.internal.ControlRecordType;
import org.apache.kafka.common.record.internal.FileRecords;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.utils.Utils;
import org.apache.kafka.server.common.RequestLocal;
import org.apache.kafka.server.storage.log.FetchIsolation;
import org.apache.kafka.storage.internals.log.AppendOrigin;
import org.apache.kafka.storage.internals.log.EpochEntry;
import org.apache.kafka.storage.internals.log.FetchDataInfo;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.server.util.Scheduler;
import org.apache.kafka.storage.internals.log.Cleaner;
import org.apache.kafka.storage.internals.log.CleanerStats;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogSegment;
import org.apache.kafka.storage.internals.log.LogStartOffsetIncrementReason;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.SkimpyOffsetMap;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.log.VerificationGuard;
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

    private final ObjectMapper json = new ObjectMapper();
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
        if (words[0].equals("load")) {
            logs.put(name, load(words));
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
            case "lead":
                lead(log, Path.of(words[3]));
                return String.valueOf(log.logEndOffset());
            case "retain":
                log.deleteOldSegments();
                return String.valueOf(log.logStartOffset());
            case "ages":
                return json.writeValueAsString(ages(log));
            case "show":
                return json.writeValueAsString(show(log));
            case "times":
                return json.writeValueAsString(times(log, words));
            case "drop":
                if (logs.remove(name) != null) {
                    log.closeQuietly();
                }
                return "";
            case "close":
                stop(logs.remove(name));
                return "";
            case "forget":
                logs.remove(name).flush(true);
                return "";
            default:
                throw new IllegalArgumentException(words[0]);
        }
    }

    private UnifiedLog create(File directory, String[] words) throws Exception {
        Files.createDirectories(directory.toPath());
        return open(directory, config(words, 4), 0, 0, true, Optional.of(Uuid.randomUuid()));
    }

    /** As LogManager does; arguments: directory, shutdown, log start, recovery point, config. */
    private UnifiedLog load(String[] words) throws Exception {
        UnifiedLog log =
                open(
                        new File(words[3]),
                        config(words, 7),
                        Long.parseLong(words[5]),
                        Long.parseLong(words[6]),
                        words[4].equals("clean"),
                        Optional.empty());
        log.updateHighWatermark(log.logEndOffset());
        return log;
    }

    private UnifiedLog open(
            File directory,
            LogConfig config,
            long logStart,
            long recoveryPoint,
            boolean isClean,
            Optional<Uuid> topicId)
            throws Exception {
        return UnifiedLog.create(
                directory,
                config,
                logStart,
                recoveryPoint,
                new AtOnce(),
                topicStats,
                clock,
                900_000,
                new ProducerStateManagerConfig(DAY_MS, false),
                600_000,
                failures,
                isClean,
                topicId);
    }

    private static LogConfig config(String[] words, int first) {
        Map<String, String> values = new HashMap<>();
        for (int i = first; i < words.length; i++) {
            String[] pair = words[i].split("=", 2);
            values.put(pair[0], pair[1]);
        }
        return new LogConfig(values);
    }

    /** As LogManager does when its broker is stopped. */
    private static void stop(UnifiedLog log) {
        log.prepareActiveSegmentForClose();
        log.flush(true);
        log.close();
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

    /** A batch is a request of its producer, or of the coordinator of its transaction. */
    private static void lead(UnifiedLog log, Path file) throws Exception {
        ByteBuffer buffer = ByteBuffer.wrap(Files.readAllBytes(file));
        while (buffer.hasRemaining()) {
            int size = 12 + buffer.getInt(buffer.position() + 8);
            ByteBuffer batch = buffer.slice(buffer.position(), size);
            buffer.position(buffer.position() + size);
            boolean isMarker = (batch.getShort(21) & 0x20) != 0;
            log.appendAsLeader(
                    MemoryRecords.readableRecords(batch),
                    batch.getInt(12),
                    isMarker ? AppendOrigin.COORDINATOR : AppendOrigin.CLIENT,
                    RequestLocal.noCaching(),
                    VerificationGuard.SENTINEL,
                    (short) 1);
        }
        log.updateHighWatermark(log.logEndOffset());
    }

    /** All that a broker says of a log, after it has looked which producers have expired. */
    private Map<String, Object> show(UnifiedLog log) throws Exception {
        log.removeExpiredProducers(clock.nowMs);
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("start", log.logStartOffset());
        shown.put("end", log.logEndOffset());
        shown.put("stable", log.lastStableOffset());
        List<Object> epochs = new ArrayList<>();
        for (EpochEntry entry : log.leaderEpochCache().epochEntries()) {
            epochs.add(List.of(entry.epoch(), entry.startOffset()));
        }
        shown.put("epochs", epochs);
        Map<String, Object> producers = new LinkedHashMap<>();
        for (DescribeProducersResponseData.ProducerState one : log.activeProducers()) {
            producers.put(
                    String.valueOf(one.producerId()),
                    List.of(
                            one.producerEpoch(),
                            one.lastSequence(),
                            one.lastTimestamp(),
                            one.coordinatorEpoch(),
                            one.currentTxnStartOffset()));
        }
        shown.put("producers", producers);
        shown.put("uncommitted", read(log, FetchIsolation.LOG_END));
        shown.put("committed", read(log, FetchIsolation.TXN_COMMITTED));
        shown.put("scan", scan(log));
        return shown;
    }

    /** Of each segment: base, size, the age that Kafka believes, that of its batches, its file's. */
    private static List<Object> ages(UnifiedLog log) throws Exception {
        List<Object> found = new ArrayList<>();
        for (LogSegment segment : log.logSegments()) {
            long told = -1;
            try {
                for (RecordBatch batch : segment.log().batches()) {
                    told = Math.max(told, batch.maxTimestamp());
                }
            } catch (Exception fault) {
                told = Math.max(told, segment.lastModified());
            }
            found.add(
                    List.of(
                            segment.baseOffset(),
                            segment.size(),
                            segment.largestTimestamp(),
                            told,
                            segment.lastModified()));
        }
        return found;
    }

    /** Arguments: the times to be looked up. */
    private static Map<String, Object> times(UnifiedLog log, String[] words) {
        Map<String, Object> found = new LinkedHashMap<>();
        for (int i = 3; i < words.length; i++) {
            found.put(words[i], time(log, Long.parseLong(words[i])));
        }
        return found;
    }

    private static Object time(UnifiedLog log, long timestamp) {
        try {
            Optional<FileRecords.TimestampAndOffset> found =
                    log.fetchOffsetByTimestamp(timestamp, Optional.empty())
                            .timestampAndOffsetOpt();
            if (found.isEmpty()) {
                return null;
            }
            int epoch = found.get().leaderEpoch.orElse(-1);
            return List.of(found.get().offset, found.get().timestamp, epoch);
        } catch (Exception fault) {
            return fault.toString();
        }
    }

    /** What a consumer gets from the log start on, as CompletedFetch gives it. */
    private static Map<String, Object> read(UnifiedLog log, FetchIsolation isolation) {
        boolean isCommitted = isolation == FetchIsolation.TXN_COMMITTED;
        long end = isCommitted ? log.lastStableOffset() : log.logEndOffset();
        long next = log.logStartOffset();
        List<Object> records = new ArrayList<>();
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("records", records);
        try {
            while (next < end) {
                FetchDataInfo fetched = log.read(next, 1 << 28, isolation, true);
                long from = next;
                next = consume(fetched, next, isCommitted, records);
                if (next == from) {
                    break;
                }
            }
        } catch (Exception fault) {
            shown.put("fault", fault.toString());
        }
        shown.put("next", next);
        return shown;
    }

    private static long consume(
            FetchDataInfo fetched, long from, boolean isCommitted, List<Object> records) {
        PriorityQueue<FetchResponseData.AbortedTransaction> aborted =
                new PriorityQueue<>(
                        Comparator.comparingLong(
                                FetchResponseData.AbortedTransaction::firstOffset));
        fetched.abortedTransactions.ifPresent(aborted::addAll);
        Set<Long> aborting = new HashSet<>();
        long next = from;
        for (RecordBatch batch : fetched.records.batches()) {
            batch.ensureValid();
            if (isCommitted && batch.hasProducerId()) {
                while (!aborted.isEmpty() && aborted.peek().firstOffset() <= batch.lastOffset()) {
                    aborting.add(aborted.poll().producerId());
                }
                if (isAbort(batch)) {
                    aborting.remove(batch.producerId());
                } else if (batch.isTransactional() && aborting.contains(batch.producerId())) {
                    next = Math.max(next, batch.nextOffset());
                    continue;
                }
            }
            for (Record record : batch) {
                if (record.offset() >= next) {
                    record.ensureValid();
                    if (!batch.isControlBatch()) {
                        records.add(fields(record));
                    }
                }
            }
            next = Math.max(next, batch.nextOffset());
        }
        return next;
    }

    /** All records of the files from the log start on, read without an index. */
    private static Map<String, Object> scan(UnifiedLog log) {
        Map<String, Object> shown = new LinkedHashMap<>();
        List<Object> records = new ArrayList<>();
        List<Object> stamps = new ArrayList<>();
        shown.put("records", records);
        shown.put("stamps", stamps);
        try {
            for (LogSegment segment : log.logSegments()) {
                for (RecordBatch batch : segment.log().batches()) {
                    if (batch.lastOffset() < log.logStartOffset()) {
                        continue;
                    }
                    batch.ensureValid();
                    for (Record record : batch) {
                        if (record.offset() < log.logStartOffset()) {
                            continue;
                        }
                        stamps.add(stamp(batch, record));
                        if (!batch.isControlBatch()) {
                            records.add(fields(record));
                        }
                    }
                }
            }
        } catch (Exception fault) {
            shown.put("fault", fault.toString());
        }
        return shown;
    }

    /** Offset, timestamp and leader epoch, the producer, and what it tells of a transaction. */
    private static List<Object> stamp(RecordBatch batch, Record record) {
        String kind = batch.isTransactional() ? "data" : "";
        if (batch.isControlBatch()) {
            kind = ControlRecordType.parse(record.key()).toString();
        }
        int epoch = batch.partitionLeaderEpoch();
        return List.of(record.offset(), record.timestamp(), epoch, batch.producerId(), kind);
    }

    private static boolean isAbort(RecordBatch batch) {
        if (!batch.isControlBatch()) {
            return false;
        }
        for (Record record : batch) {
            return ControlRecordType.parse(record.key()) == ControlRecordType.ABORT;
        }
        return false;
    }

    private static List<Object> fields(Record record) {
        List<Object> fields = new ArrayList<>();
        fields.add(record.offset());
        fields.add(record.timestamp());
        fields.add(text(record.key()));
        fields.add(text(record.value()));
        for (Header header : record.headers()) {
            fields.add(header.key());
            fields.add(header.value() == null ? null : text(ByteBuffer.wrap(header.value())));
        }
        return fields;
    }

    private static String text(ByteBuffer data) {
        return data == null ? null : Base64.getEncoder().encodeToString(Utils.toArray(data));
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
