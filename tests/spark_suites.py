"""Parts of Spark's Kafka connector that `docs/conformance.md` must list: options, tests by suite.

The tests are those of Spark 4 (connector/kafka-0-10-sql). A suite that Spark runs several times, in
its V1 and V2 source and with both of its offset readers, is listed once.
"""

_OPTIONS = """
    assign subscribe subscribePattern kafka.bootstrap.servers startingTimestamp
    startingOffsetsByTimestamp startingOffsets startingOffsetsByTimestampStrategy endingTimestamp
    endingOffsetsByTimestamp endingOffsets failOnDataLoss kafkaConsumer.pollTimeoutMs
    fetchOffset.numRetries fetchOffset.retryIntervalMs maxOffsetsPerTrigger minOffsetsPerTrigger
    maxTriggerDelay minPartitions maxRecordsPerPartition groupIdPrefix kafka.group.id includeHeaders
    kafka.isolation.level _mockSystemTime kafka.auto.offset.reset kafka.key.deserializer
    kafka.value.deserializer kafka.enable.auto.commit kafka.interceptor.classes kafka.* topic
    kafka.partitioner.class kafka.key.serializer kafka.value.serializer
"""
OPTIONS = _OPTIONS.split()
"""Of the source, of the sink, and the client's that Spark refuses."""
_STARTS = (
    "latest offsets",
    "earliest offsets",
    "specific offsets",
    "specific timestamps",
    "global timestamp per topic",
)
_PARTITION = "with minPartition ="
_SINKS_STREAMS = [
    f"streaming - {name}"
    for name in (
        "write to kafka with topic field",
        "write w/o topic field, with topic option",
        "topic field and topic option",
        "write data with bad schema",
        "write data with valid schema but wrong types",
        "write to non-existing topic",
        "exception on config serializer",
    )
]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


SUITES = {
    "KafkaMicroBatchSourceSuite": _lines("""
        async progress tracking
        Trigger.AvailableNow
        Query with Trigger.AvailableNow should throw error when topic partitions got unavailable during subsequent batches
        Query with Trigger.AvailableNow should throw error when offset(s) in planned topic partitions got unavailable during subsequent batches
        (de)serialization of initial offsets
        SPARK-26718 Rate limit set to Long.Max should not overflow integer during end offset calculation
        maxOffsetsPerTrigger
        minOffsetsPerTrigger
        compositeReadLimit
        input row metrics
        subscribing topic by pattern with topic deletions
        SPARK-41375: empty partitions should not record to latest offset
        subscribe topic by pattern with topic recreation between batches
        ensure that initial offset are written with an extra byte in the beginning (SPARK-19517)
        deserialization of initial offset written by Spark 2.1.0 (SPARK-19517)
        deserialization of initial offset written by future version
        KafkaSource with watermark
        delete a topic when a Spark job is running
        SPARK-22956: currentPartitionOffsets should be set when no new data comes in
        allow group.id prefix
        allow group.id override
        ensure stream-stream self-join generates only one offset in log and correct metrics
        read Kafka transactional messages: read_committed
        read Kafka transactional messages: read_uncommitted
        SPARK-25495: FetchedData.reset should reset all fields
        SPARK-27494: read kafka record containing null key/values.
        SPARK-30656: minPartitions
        V1 Source is used when disabled through SQLConf
        V2 Source is used by default
        minPartitions is supported
        default config of includeHeader doesn't break existing query from Spark 2.4
        test custom metrics - with rate limit
        test custom metrics - no rate limit
        test custom metrics - corner cases
    """),  # noqa: E501
    "KafkaSourceSuiteBase": [
        "cannot stop Kafka stream",
        *(
            f"{way} from {start} (failOnDataLoss: {fails})"
            for fails in ("true", "false")
            for way in ("assign", "subscribing topic by name", "subscribing topic by pattern")
            for start in _STARTS
        ),
        *(
            f"subscribing topic by {way} from {start} with non-matching starting offset"
            for way in ("name", "pattern")
            for start in _STARTS[3:]
        ),
        "SPARK-53560: no crash looping during uncommitted batch retry in AvailableNow trigger",
        "bad source options",
        "unsupported kafka configs",
        "get offsets from case insensitive parameters",
        "Kafka column types",
    ],
    "KafkaSourceStressSuite": ["stress test with multiple topics and partitions"],
    "KafkaDontFailOnDataLossSuite": [
        *(
            f"failOnDataLoss=false should not return duplicated records: {kind}"
            for kind in (
                "microbatch v1",
                "microbatch v2",
                "continuous processing",
                "batch v1",
                "batch v2",
            )
        ),
        "stress test for failOnDataLoss=false",
    ],
    "KafkaRelationSuite": _lines("""
        explicit earliest to latest offsets
        default starting and ending offsets
        explicit offsets
        default starting and ending offsets with headers
        timestamp provided for starting and ending
        timestamp provided for starting, offset provided for ending
        timestamp provided for ending, offset provided for starting
        timestamp provided for starting, ending not provided
        timestamp provided for ending, starting not provided
        global timestamp provided for starting and ending
        no matched offset for timestamp - startingOffsets
        preferences on offset related options
        no matched offset for timestamp - endingOffsets
        reuse same dataframe in query
        test late binding start offsets
        bad batch query options
        read Kafka transactional messages: read_committed
        read Kafka transactional messages: read_uncommitted
        SPARK-30656: minPartitions
        topic-partition for start offset and end offset must match
        unresolved start offset greater than end offset
        resolved start offset greater than end offset (without latest)
        resolved start offset greater than end offset (with latest)
        V1 Source is used when set through SQLConf
        V2 Source is used when set through SQLConf
    """),
    "KafkaSourceOffsetSuite": _lines("""
        comparison {"t":{"0":1}} <=> {"t":{"0":2}}
        comparison {"t":{"0":1,"1":0}} <=> {"t":{"0":2,"1":1}}
        comparison {"T":{"0":0},"t":{"0":1}} <=> {"T":{"0":1},"t":{"0":2}}
        comparison {"t":{"0":1}} <=> {"t":{"0":2,"1":1}}
        comparison {"t":{"0":1}} <=> {"t":{"0":2,"1":3}}
        basic serialization - deserialization
        OffsetSeqLog serialization - deserialization
        read Spark 2.1.0 offset format
    """),
    "KafkaOffsetRangeCalculatorSuite": [
        "with no minPartition: N TopicPartitions to N offset ranges",
        "with no minPartition: empty ranges ignored",
        f"{_PARTITION} 3: N TopicPartitions to N offset ranges",
        f"{_PARTITION} 3: N TopicPartitions to N offset ranges with executors",
        f"{_PARTITION} 4: 1 TopicPartition to N offset ranges",
        f"{_PARTITION} 4: N skewed TopicPartitions to M offset ranges",
        f"{_PARTITION} 4: SPARK-30656: ignore empty ranges and split the rest",
        f"{_PARTITION} 4: SPARK-30656: N very skewed TopicPartitions to M offset ranges",
        f"{_PARTITION} 1: SPARK-30656: minPartitions less than the length of topic partitions",
        f"{_PARTITION} 3: range inexact multiple of minPartitions",
        f"{_PARTITION} 4: empty ranges ignored",
        f"{_PARTITION} 6: SPARK-28489: never drop offsets",
        f"{_PARTITION} 9: SPARK-36576: 0 small unsplit ranges and 3 large split ranges",
        f"{_PARTITION} 6: SPARK-36576: 1 small unsplit range and 2 large split ranges",
        f"{_PARTITION} 6: SPARK-36576: 2 small unsplit ranges and 1 large split range",
        f"{_PARTITION} 3: SPARK-46798: locations set when ranges unsplit",
        f"{_PARTITION} 4: SPARK-46798: locations not set when ranges split",
        "with maxRecordsPerPartition = 4: SPARK-49259: 1 TopicPartition to N offset ranges",
        "with maxRecordsPerPartition = 20: SPARK-49259: N TopicPartition to N offset ranges",
        "with minPartitions = 1 and maxRecordsPerPartition = 20: "
        "SPARK-49259: 1 TopicPartition with low minPartitions value",
        "with minPartitions = 4 and maxRecordsPerPartition = 20: "
        "SPARK-49259: 1 TopicPartition with high minPartitions value",
    ],
    "KafkaOffsetReaderSuite": _lines("""
        isolationLevel must give back default isolation level when not set
        isolationLevel must give back READ_UNCOMMITTED when set
        isolationLevel must give back READ_COMMITTED when set
        isolationLevel must throw exception when invalid isolation level set
        SPARK-30656: getOffsetRangesFromUnresolvedOffsets - using specific offsets
        SPARK-30656: getOffsetRangesFromUnresolvedOffsets - using special offsets
        SPARK-48383: START_OFFSET_DOES_NOT_MATCH_ASSIGNED error class
        SPARK-30656: getOffsetRangesFromUnresolvedOffsets - multiple topic partitions
        SPARK-30656: getOffsetRangesFromResolvedOffsets
        KAFKA_TIMESTAMP_OFFSET_DOES_NOT_MATCH_ASSIGNED error class - partitions assigned: 3, specified: 2
        KAFKA_TIMESTAMP_OFFSET_DOES_NOT_MATCH_ASSIGNED error class - partitions assigned: 3, specified: 4
        SPARK-55561: fetchPartitionOffsets retries on transient failures
        SPARK-55561: fetchPartitionOffsets throws after all retries exhausted
    """),  # noqa: E501
    "KafkaSourceProviderSuite": _lines("""
        batch mode - options should be handled as case-insensitive
        micro-batch mode - options should be handled as case-insensitive
        continuous mode - options should be handled as case-insensitive
    """),
    "JsonUtilsSuite": _lines("""
        parsing partitions
        parsing partitionOffsets
        parsing specificOffsets
        parsing specificOffsets with topic-level earliest/latest
        parsing specificOffsets mixing topic-level and partition-level values
        parsing specificOffsets rejects a topic given in both forms
        parsing specificOffsets rejects malformed json
    """),
    "ConsumerStrategySuite": _lines("""
        createAdmin must create admin properly
        AssignStrategy.assignedTopicPartitions must give back all assigned
        AssignStrategy.assignedTopicPartitions must skip invalid partitions
        SubscribeStrategy.assignedTopicPartitions must give back all assigned
        SubscribePatternStrategy.assignedTopicPartitions must give back all assigned
    """),
    "KafkaSinkSuite": [
        *_SINKS_STREAMS,
        "streaming - sink progress is produced",
        "batch - write to kafka",
        "batch - partition column and partitioner priorities",
        "batch - null topic field value, and no topic option",
        "SPARK-20496: batch - enforce analyzed plans",
        "batch - unsupported save modes",
        "generic - write big data with small producer buffer",
    ],
    "KafkaContinuousSinkSuite": [
        *_SINKS_STREAMS,
        "generic - write big data with small producer buffer",
    ],
}
