"""Every byte layout and every file name, in one place.

`docs/format.md` documents Kafka's layouts; each comment names the class that defines the layout in
Apache Kafka. All integers are big-endian. The `commit` journal and the names that begin with `kl-`
are ours; a Kafka broker ignores them.

This module is pure: no files, no clock, no third-party imports. The kernels import it too.
"""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterable
from typing import Final

# --- record batch v2: org.apache.kafka.common.record.DefaultRecordBatch --------------------------
BATCH_HEADER: Final = struct.Struct(
    ">q"  # base_offset: of the first record, even if a cleaner removed it
    "i"  # batch_length: bytes after this field
    "i"  # partition_leader_epoch: -1 none
    "b"  # magic: 2
    "I"  # crc: CRC-32C of the rest
    "h"  # attributes: see the bits below
    "i"  # last_offset_delta
    "q"  # base_timestamp: ms of the first record, or the delete horizon
    "q"  # max_timestamp: ms
    "q"  # producer_id: -1 none
    "h"  # producer_epoch: -1 none
    "i"  # base_sequence: -1 none
    "i"  # records_count
)
BATCH_OVERHEAD: Final = 61
assert BATCH_HEADER.size == BATCH_OVERHEAD
LOG_OVERHEAD: Final = 12
"""Bytes not counted by `batch_length`: base_offset and batch_length."""
LENGTH_POSITION: Final = 8
EPOCH_POSITION: Final = 12
MAGIC_POSITION: Final = 16
CRC_POSITION: Final = 17
ATTRIBUTES_POSITION: Final = 21
"""The checksum covers the batch from here on."""
LAST_OFFSET_DELTA_POSITION: Final = 23
BASE_TIMESTAMP_POSITION: Final = 27
MAX_TIMESTAMP_POSITION: Final = 35
PRODUCER_ID_POSITION: Final = 43
PRODUCER_EPOCH_POSITION: Final = 51
BASE_SEQUENCE_POSITION: Final = 53
RECORDS_COUNT_POSITION: Final = 57
MAGIC: Final = 2
STAMP_OFFSET: Final = struct.Struct(">q")  # base_offset, at byte 0 of a batch
STAMP_EPOCH: Final = struct.Struct(">i")  # partition_leader_epoch, at byte 12
BATCH_PLACE: Final = struct.Struct(
    ">q"  # base_offset, at byte 0 of a batch
    "i4x"  # batch_length
    "b6x"  # magic
    "i8x"  # last_offset_delta
    "q"  # max_timestamp
)

# --- messages v0 and v1, before there were batches: LegacyRecord, AbstractLegacyRecordBatch -------
MESSAGE_HEADER_V0: Final = struct.Struct(
    ">q"  # offset; in a wrapper (a compressed set) that of its last message
    "i"  # size: bytes after this field
    "I"  # crc: CRC-32 (zlib's) of the rest
    "b"  # magic: 0 or 1, at the same position as in a batch
    "b"  # attributes: codec and, in v1, timestamp type
)
MESSAGE_HEADER_V1: Final = struct.Struct(
    ">qiIbb"  # as in v0
    "q"  # timestamp: ms
)
MESSAGE_FIELD_SIZE: Final = struct.Struct(">i")  # before the key and before the value; -1 null
MESSAGE_CRC_POSITION: Final = 12
MESSAGE_ATTRIBUTES_POSITION: Final = 17
MESSAGE_TIMESTAMP_POSITION: Final = 18
MESSAGE_KEY_POSITION_V0: Final = 18
"""The position of the key's size."""
MESSAGE_KEY_POSITION_V1: Final = 26
MESSAGE_SIZE_MIN_V0: Final = 26
"""Bytes of a whole message without key and value."""
MESSAGE_SIZE_MIN_V1: Final = 34
assert MESSAGE_HEADER_V0.size == MESSAGE_KEY_POSITION_V0
assert MESSAGE_HEADER_V1.size == MESSAGE_KEY_POSITION_V1

CODEC_MASK: Final = 0x07
TIMESTAMP_TYPE_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
CONTROL_BIT: Final = 0x20
DELETE_HORIZON_BIT: Final = 0x40

CODEC_NONE: Final = 0
CODEC_GZIP: Final = 1
CODEC_SNAPPY: Final = 2
CODEC_LZ4: Final = 3
CODEC_ZSTD: Final = 4
CODECS: Final = {
    "none": CODEC_NONE,
    "gzip": CODEC_GZIP,
    "snappy": CODEC_SNAPPY,
    "lz4": CODEC_LZ4,
    "zstd": CODEC_ZSTD,
}
CODEC_NAMES: Final = {codec: name for name, codec in CODECS.items()}

CREATE_TIME: Final = 0
LOG_APPEND_TIME: Final = 1
NO_TIMESTAMP_TYPE: Final = -1
"""For messages v0, which have no timestamp."""
NO_TIMESTAMP: Final = -1
INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1
LOG_START_MAX: Final = INT64_MAX - 2**31
"""The highest log start: above it a batch, which spans less than 2^31 offsets, may not fit."""

# --- compressed record sections: the framing around the blocks -----------------------------------
GZIP_HEADER: Final = bytes.fromhex("1f8b08000000000000ff")
"""Deflate, no name, no time, unknown operating system, like Java's GZIPOutputStream."""
GZIP_TRAILER: Final = struct.Struct("<II")  # CRC-32 (zlib), size modulo 2^32; little-endian
XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
XERIAL_HEADER: Final = struct.Struct(">8sii")  # magic, version, lowest compatible version
XERIAL_BLOCK: Final = struct.Struct(">i")  # bytes of the raw snappy block that follows
LZ4_MAGIC: Final = bytes.fromhex("04224d18")
LZ4_FLAGS_POSITION: Final = 4
LZ4_CONTENT_SIZE_BIT: Final = 0x08
LZ4_DICTIONARY_BIT: Final = 0x01
LZ4_DESCRIPTOR_SIZE: Final = 2
"""Bytes of flags and block descriptor; optional content size (8) and dictionary (4) follow."""

# --- indexes: OffsetIndex, TimeIndex -------------------------------------------------------------
OFFSET_INDEX_ENTRY: Final = struct.Struct(
    ">i"  # relative_offset: last offset of the batch, minus the segment's base offset
    "i"  # position: where that batch starts in the .log file
)
TIME_INDEX_ENTRY: Final = struct.Struct(
    ">q"  # timestamp: the largest in the segment up to that batch
    "i"  # relative_offset: last offset of the batch that carries it
)
TRANSACTION_INDEX_ENTRY: Final = struct.Struct(
    ">h"  # version: 0
    "q"  # producer_id
    "q"  # first_offset: of the aborted transaction
    "q"  # last_offset: of its ABORT marker
    "q"  # last_stable_offset: after it was aborted
)
assert (OFFSET_INDEX_ENTRY.size, TIME_INDEX_ENTRY.size, TRANSACTION_INDEX_ENTRY.size) == (8, 12, 34)

# --- producer snapshots: ProducerStateManager ----------------------------------------------------
SNAPSHOT_HEADER: Final = struct.Struct(
    ">h"  # version: SNAPSHOT_VERSION
    "I"  # crc: CRC-32C of the rest
    "i"  # count: of entries
)
SNAPSHOT_ENTRY: Final = struct.Struct(
    ">q"  # producer_id
    "h"  # producer_epoch
    "i"  # last_sequence: of its last batch
    "q"  # last_offset: of its last batch; below 0 without one
    "i"  # offset_delta: last offset minus base offset of that batch
    "q"  # timestamp: ms, of its last batch or marker
    "i"  # coordinator_epoch: of its last marker, -1 none
    "q"  # current_txn_first_offset: of its open transaction, -1 none
)
SNAPSHOT_VERSION: Final = 1
SNAPSHOT_CRC_END: Final = 6
"""The checksum covers the file from here on."""
assert (SNAPSHOT_HEADER.size, SNAPSHOT_ENTRY.size) == (10, 46)

# --- control records: ControlRecordType, EndTransactionMarker ------------------------------------
CONTROL_KEY: Final = struct.Struct(">hh")  # version: 0 or later; type
END_TXN_VALUE: Final = struct.Struct(">hi")  # version: 0 or later; coordinator_epoch
CONTROL_TYPES: Final = {
    0: "ABORT",
    1: "COMMIT",
    2: "LEADER_CHANGE",
    3: "SNAPSHOT_HEADER",
    4: "SNAPSHOT_FOOTER",
    5: "KRAFT_VERSION",
    6: "KRAFT_VOTERS",
}
MARKER_SIZE: Final = 78
"""Bytes of the batch that ends a transaction, in every version of Kafka."""
MARKER_START: Final = bytes.fromhex("2000000008")
"""The start of its record: length, attributes, two deltas of 0, the key's length."""
CONTROL_ABORT: Final = 0
CONTROL_COMMIT: Final = 1

# --- records of KRaft's metadata: AbstractApiMessageSerde, common/metadata/*.json -----------------
METADATA_FRAME_VERSION: Final = 1
"""A record's value: frame version, api key and version as unsigned varints, then its fields."""
TOPIC_RECORD: Final = 2
PARTITION_RECORD: Final = 3
CONFIG_RECORD: Final = 4
PARTITION_CHANGE_RECORD: Final = 5
REMOVE_TOPIC_RECORD: Final = 9
BEGIN_TRANSACTION_RECORD: Final = 23
END_TRANSACTION_RECORD: Final = 24
ABORT_TRANSACTION_RECORD: Final = 25
AUTOMQ_RECORDS: Final = range(501, 600)
"""Types of AutoMQ's own, from S3StreamRecord on; Kafka's are far below."""
CONFIG_OF_TOPIC: Final = 2
"""The resource type of a config record."""
FLOAT64: Final = struct.Struct(">d")  # a float64 of Kafka's messages
TOPIC_ID_SIZE: Final = 16
TOPIC_ID_TEXT_SIZE: Final = 22

# --- file names: LogFileUtils, UnifiedLog --------------------------------------------------------
LOG: Final = ".log"
INDEX: Final = ".index"
TIME_INDEX: Final = ".timeindex"
TRANSACTION_INDEX: Final = ".txnindex"
SNAPSHOT: Final = ".snapshot"
SEGMENT_SUFFIXES: Final = (LOG, INDEX, TIME_INDEX, TRANSACTION_INDEX)
CLEANED: Final = ".cleaned"
SWAP: Final = ".swap"
DELETED: Final = ".deleted"
TEMPORARY: Final = ".tmp"

PARTITION_METADATA: Final = "partition.metadata"
LEADER_EPOCH_CHECKPOINT: Final = "leader-epoch-checkpoint"
RECOVERY_POINT_CHECKPOINT: Final = "recovery-point-offset-checkpoint"
LOG_START_CHECKPOINT: Final = "log-start-offset-checkpoint"
REPLICATION_CHECKPOINT: Final = "replication-offset-checkpoint"
CLEANER_CHECKPOINT: Final = "cleaner-offset-checkpoint"
META_PROPERTIES: Final = "meta.properties"
CLEAN_SHUTDOWN: Final = ".kafka_cleanshutdown"
METADATA_DIRECTORY: Final = "__cluster_metadata-0"
ROOT_LOCK: Final = ".lock"

# --- ours: names that no Kafka broker parses or deletes, except the canary -----------------------
COMMIT: Final = "commit"
COMMIT_TEMPORARY: Final = "kl-commit.tmp"
COMMIT_LOCK: Final = "kl-commit.lock"
COMMIT_RELEASED: Final = "kl-commit.released"
"""The journal of a released log, which the next `adopt` reads."""
CLEAN_ASIDE: Final = "kl-cleanshutdown"
"""A broker's `.kafka_cleanshutdown` while its directory is ours, after a clean shutdown."""
GUARD: Final = "kl-owned-by-kafkalog"
"""A directory in the root of an adopted log. Its name is not a partition's, and a broker refuses to
start on such a directory, even after a new format of the storage."""
META_ASIDE: Final = "kl-meta.properties"
"""A broker's `meta.properties` while its directory is ours; no broker starts without it."""
METADATA_ASIDE: Final = "kl-partition.metadata"
"""The next content of `partition.metadata`, while a release gives a topic another id."""
ADOPTED_TOPICS: Final = "kl-adopted-topics"
"""Names and ids of the topics that the broker's cluster knew at the adoption."""
REMOTE_LOG_STARTS: Final = "kl-remote-log-starts"
"""Where the logs of a broker with tiered storage began at the adoption."""
CLEANER_LOCK: Final = "kl-cleaner.lock"
CLEANERS_LOCK: Final = "kl-cleaners.lock"
"""In the root: background cleaners share it while they run."""
CLEANING_PAUSED: Final = "kl-cleaning-paused.lock"
"""Shared by processes that keep cleaners away from a partition."""
UNCLEANABLE: Final = "kl-uncleanable"
SNAPSHOT_TEMPORARY: Final = "kl-snapshot.tmp"
"""An unfinished producer snapshot; at most one in a partition's directory."""
DELETE_HORIZON: Final = "kl-delete-horizon"
LAST_CLEANING: Final = "kl-last-cleaning"
"""Time and result of a partition's last cleaning."""
SPILL: Final = "kl-spill-"
"""Prefix of a cleaner's temporary files: keys that did not fit its memory."""
SPILLING: Final = "kl-spilling"
"""The number of unfinished cleanings in a row that needed such files."""
PIN: Final = "kl-pin-"
"""In the root: prefix of snapshot pins; see `pins`."""
ENDED_PINS: Final = "kl-ended-pins"
"""In the root: the remains of ended pins; see `ended_pins`."""
CHANGELOG_LOCK: Final = "kl-changelog.lock"
"""In the root: shared by tasks that read the changelog of a pinned snapshot; see `pins`."""
SEGMENTS_LOCK: Final = "kl-segments.lock"
SEGMENTS_TURNSTILE: Final = "kl-segments.turnstile"
CANARY: Final = "kl-canary.deleted"
"""A file that every broker deletes when it loads a partition, and kafkalog never does."""
UNRECORDED: Final = "kl-unrecorded"
"""In a partition's directory until a journal record is known to name its topic."""
GAPS: Final = "kl-gaps"
"""The gaps in the offsets of cleaned segments; see `gaps`."""
RAW_GAPS: Final = "kl-raw-gaps"
"""The gaps that raw appends have left."""
KEYS: Final = ".keys"
"""The key index of a cleaned segment; see `key_index_file`."""
STAGED: Final = ".staged"
STAGED_INDEX: Final = ".staged-offsets"
STAGED_TIME_INDEX: Final = ".staged-times"
OURS: Final = "kl-"

FILE_NAME_MAX: Final = 255
_DIGITS = 20
_SEGMENT_FILE = re.compile(
    r"^(\d{20})(\.(?:log|index|timeindex|txnindex|snapshot))(\.cleaned|\.swap|\.deleted)?\Z"
)
_FUTURE = re.compile(r"^(.+-\d+)\.[0-9a-f]{32}-future\Z")
_METADATA_SNAPSHOT = re.compile(r"^(\d{20})-(\d{10})\.checkpoint$")
_TOPIC_NAME = re.compile(r"^[a-zA-Z0-9._-]{1,249}\Z")
PARTITIONS_MAX: Final = 100_000
"""Each partition is a directory; the limit guards against a typing error."""
METADATA_TOPIC: Final = "__cluster_metadata"
GROUPS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"
SHARE_STATE_TOPIC: Final = "__share_group_state"
REMOTE_LOG_TOPIC: Final = "__remote_log_metadata"
"""Of tiered storage (KIP-405). A topic like any other to a broker: it is not in Kafka's Topic."""
INTERNAL_TOPICS: Final = (METADATA_TOPIC, GROUPS_TOPIC, TRANSACTIONS_TOPIC, SHARE_STATE_TOPIC)
"""Kafka's own topics, and its metadata's. Kafka: org.apache.kafka.common.internals.Topic."""


def segment_file(base_offset: int, suffix: str, stage: str = "") -> str:
    """Return the name of a segment's file, such as `00000000000000000042.log.swap`."""
    return f"{base_offset:0{_DIGITS}d}{suffix}{stage}"


def key_index_file(base_offset: int) -> str:
    """Return the name of a cleaned segment's key index, such as `kl-00000000000000000042.keys`."""
    return f"{OURS}{base_offset:0{_DIGITS}d}{KEYS}"


def is_key_index(name: str) -> bool:
    """Tell whether a file is a key index, by its name."""
    return name.startswith(OURS) and name.endswith(KEYS)


def parse_segment_file(name: str) -> tuple[int, str, str] | None:
    """Return (base offset, suffix, stage) of a segment's file; the stage of a live file is ''."""
    match = _SEGMENT_FILE.match(name)
    if match is None:
        return None
    return int(match[1]), match[2], match[3] or ""


def base_offsets(names: Iterable[str], suffix: str) -> list[int]:
    """Return the offsets in the names of live files with a suffix, ascending."""
    parsed = filter(None, map(parse_segment_file, names))
    return sorted(offset for offset, *kind in parsed if kind == [suffix, ""])


def parse_metadata_snapshot(name: str) -> tuple[int, int] | None:
    """Return (end offset, epoch) from the name of a KRaft metadata snapshot, or None."""
    match = _METADATA_SNAPSHOT.match(name)
    return None if match is None else (int(match[1]), int(match[2]))


def parse_partition_directory(name: str) -> tuple[str, int] | None:
    """Return (topic, partition) from the name of a partition's directory, or None.

    The directories of deleted, stray and future partitions end in words and give None. Kafka:
    UnifiedLog.parseTopicPartitionName.
    """
    topic, dash, number = name.rpartition("-")
    if not dash or topic_name_fault(topic) is not None:
        return None
    is_number = number.isascii() and number.isdigit() and str(int(number)) == number
    return (topic, int(number)) if is_number and int(number) <= INT32_MAX else None


def parse_future_directory(name: str) -> tuple[str, int] | None:
    """Return (topic, partition) from the name of a future partition's directory, or None.

    A broker makes one to move a partition to another disk. Kafka: UnifiedLog.logFutureDirName.
    """
    match = _FUTURE.match(name)
    return None if match is None else parse_partition_directory(match[1])


def topic_id_text(data: bytes) -> str:
    """Return 16 bytes as Kafka writes a topic's id: 22 characters."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def is_topic_id(text: str) -> bool:
    """Return whether a text is a topic id in Kafka's form, and not the zero id.

    Kafka: Uuid.fromString.
    """
    try:
        data = base64.b64decode(text + "==", altchars=b"-_", validate=True)
    except ValueError:
        return False
    return len(data) == TOPIC_ID_SIZE and any(data) and topic_id_text(data) == text


def partition_directory(topic: str, partition: int) -> str:
    """Return the name of a partition's directory."""
    return f"{topic}-{partition}"


def deleted_directory(topic: str, partition: int, topic_id: str) -> str:
    """Return the name of a partition's directory after its topic was deleted.

    Kafka's form, with the topic shortened so that 255 characters suffice: `<topic>-<n>.<32
    hex>-delete`. Kafka draws the digits; here they are the topic's id, so every process that
    finishes a deletion uses the same name. Kafka: UnifiedLog.logDeleteDirName.
    """
    digits = base64.urlsafe_b64decode(topic_id + "==").hex()
    suffix = f"-{partition}.{digits}-delete"
    return topic[: FILE_NAME_MAX - len(suffix)] + suffix


def topic_name_fault(name: str) -> str | None:
    """Return why Kafka forbids a topic name, or None if it allows it (Kafka: Topic.validate)."""
    if not isinstance(name, str) or name in {".", ".."} or not _TOPIC_NAME.match(name):
        return (
            f"topic name {name!r} is not allowed: 1 to 249 characters out of "
            "a-z A-Z 0-9 . _ - are expected, and not . or .. alone"
        )
    return None


def staged_file(writer: str, batch_id: int, spark_partition: int, attempt: int, part: int) -> str:
    """Return the name, without suffix, of a sink task's staged file; `part` counts large files."""
    tail = f"-{part}" if part else ""
    return f"{OURS}{writer}-{batch_id}-{spark_partition}-{attempt}{tail}"


def staged_prefix(writer: str, batch_id: int) -> str:
    """Return the prefix of the names of all files that a writer stages for a batch."""
    return f"{OURS}{writer}-{batch_id}-"


def parse_staged(name: str) -> tuple[str, int, int] | None:
    """Return (writer, batch id, run) from the name of a staged file, or None.

    The run identifies one start of a query; it is the lower half of the attempt.
    """
    fields = name.partition(".")[0].removeprefix(OURS).split("-")
    if not name.startswith(OURS) or len(fields) < 4 or not all(map(str.isdecimal, fields[1:])):
        return None
    return fields[0], int(fields[1]), int(fields[3]) & 0xFFFF_FFFF


def is_staged_path(name: str) -> bool:
    """Return whether a path below the root is a place for staged files.

    That is the root itself or a partition's directory.
    """
    directory, slash, file = name.rpartition("/")
    if slash and parse_partition_directory(directory) is None:
        return False
    return file.endswith(STAGED) and parse_staged(file) is not None


# --- ours: the `commit` journal ------------------------------------------------------------------
JOURNAL_HEADER: Final = struct.Struct(
    ">8s"  # magic: JOURNAL_MAGIC
    "I"  # format version: JOURNAL_VERSION
    "16s"  # generation: random, new at every rewrite of the file
)
JOURNAL_PUBLISHED: Final = struct.Struct(
    ">Q"  # published_end: readers stop at this byte
    "Q"  # synced_end: the bytes below are synced and survive a power cut
    "8s"  # host: digest of the host's id
    "8s"  # boot: digest of the id of the boot that wrote the two numbers
)
CHECKSUM: Final = struct.Struct(">I")
JOURNAL_RECORD: Final = struct.Struct(
    ">I"  # length: bytes of the payload; 0 ends the journal
    "I"  # CRC-32C of number and payload
    "Q"  # number: one more than the record before
)
JOURNAL_NUMBER: Final = struct.Struct(">Q")
JOURNAL_MAGIC: Final = b"kafkalog"
JOURNAL_VERSION: Final = 1
JOURNAL_PUBLISHED_POSITION: Final = 64
JOURNAL_SYNCING_POSITION: Final = 100
"""A byte after that and its checksum: 1 while a process syncs the bytes of relaxed commits."""
JOURNAL_WORKING_POSITION: Final = JOURNAL_SYNCING_POSITION + 1
"""The next byte: 1 from before a writer truncates or appends up to its record."""
JOURNAL_RECORDS_POSITION: Final = 512
"""Records begin in their own disk sector: a torn record cannot damage the header."""
JOURNAL_SIZE: Final = 1 << 20
"""The preallocated size; a full journal is rewritten as one snapshot record."""

# --- ours: `kl-gaps` and `kl-raw-gaps` -----------------------------------------------------------
GAPS_HEADER: Final = struct.Struct(
    ">8s"  # magic: GAPS_MAGIC
    "I"  # format version: GAPS_VERSION
    "I"  # count: of parts
)
GAPS_PART: Final = struct.Struct(
    ">q"  # base_offset: of the segment; of raw gaps 0
    "q"  # size: bytes of its .log file; of raw gaps -1
    "I"  # number: of the part in its section; 0 begins one
    "I"  # count: of gaps in the part
    "q"  # first_from: start of its first gap, -1 without one
    "I"  # crc: CRC-32C of its gaps
)
GAP: Final = struct.Struct(
    ">q"  # from_offset: one past the last offset before the gap
    "q"  # to_offset: start of the next batch or segment, or end of the cleaned section
)
GAPS_MAGIC: Final = b"kl-gaps\n"
GAPS_VERSION: Final = 1
GAPS_PART_MAX: Final = 1 << 15
"""The most gaps in a part: 512 KiB, the memory of a reader of the list."""
RAW_GAPS_SIZE: Final = -1
"""In place of the segment's size in a section of `kl-gaps`."""

# --- ours: `kl-<base>.keys` ----------------------------------------------------------------------
KEYS_HEADER: Final = struct.Struct(
    ">8s"  # magic: KEYS_MAGIC
    "I"  # format version: KEYS_VERSION
    "q"  # base_offset: of the segment
    "q"  # size: bytes of its .log file
    "q"  # count: of entries
    "16s"  # secret: the hash key, the same in all indexes of a partition if possible
    "I"  # flags: KEYS_UNCHANGED or 0
    "I"  # samples: their number, at most KEYS_SAMPLES_MAX
)
KEYS_SAMPLE: Final = struct.Struct(
    ">I"  # position: of a batch in the .log file
    "I"  # crc: from that batch's header
)
KEYS_ENTRY: Final = struct.Struct(">Q")  # the hash's top 33 bits, then 31 bits of position
KEYS_POSITION_BITS: Final = 31
KEYS_BLOCK: Final = 4096
"""Size of the blocks of header and entries; each block ends with the checksum of its content.

A block has KEYS_BLOCK_ENTRIES entries, ascending over all blocks, and four zeros before its
checksum. Ones fill the rest of the last block."""
KEYS_BLOCK_ENTRIES: Final = KEYS_BLOCK // 8 - 1
KEYS_SAMPLES_MAX: Final = 8
KEYS_MAGIC: Final = b"kl-keys\n"
KEYS_VERSION: Final = 2
KEYS_UNCHANGED: Final = 1
"""No record of the segment waits for a time or for the rest of the log: `unchanged_segments`."""

# --- ours: the filter of a key index, in the object next to a segment object ---------------------
STORED_FILTER: Final = ".filter"
FILTER_BITS_PER_KEY: Final = 16
FILTER_WORDS: Final = 8  # of uint32, in a block
FILTER_SALTS: Final = (
    *(0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D),
    *(0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31),
)
"""A key has one bit in each word of its block, as in a Bloom filter of Parquet.

With the hash h of 33 bits, the block is h * blocks / 2^33. With the low half m of h mixed by
splitmix64's last steps, the bit is the top five bits of m * salt, modulo 2^32."""

# --- ours: a log in an object store --------------------------------------------------------------
STORED_HEADER: Final = struct.Struct(
    ">8s"  # magic: says which of the four it is
    "I"  # format version: STORED_VERSION
    "I"  # crc: CRC-32C of number, token and payload
    "Q"  # number: of the commit
    "16s"  # token: the log's id; of a commit its first bytes, then random ones of the writer
)
assert STORED_HEADER.size == 40
STORED_TOKEN_ID: Final = 8  # bytes of the log's id with which each token begins
STORED_CHECKED: Final = struct.Struct(">Q16s")  # number and token, as the checksum takes them
STORED_LOG_MAGIC: Final = b"kafkalog"
STORED_COMMIT_MAGIC: Final = b"klcommit"
STORED_SNAPSHOT_MAGIC: Final = b"kl-state"
STORED_BOUNDARY_MAGIC: Final = b"kl-bound"
STORED_VERSION: Final = 1
MIXED_TRAILER: Final = struct.Struct(
    ">I"  # size: of the footer's payload, which ends where this begins
    "I"  # crc: CRC-32C of the payload
    "I"  # format version: MIXED_VERSION
    "8s"  # magic: MIXED_MAGIC
)
MIXED_MAGIC: Final = b"kl-mixed"
MIXED_VERSION: Final = 1
SIDE_HEADER: Final = struct.Struct(
    ">8s"  # magic: SIDE_MAGIC
    "I"  # format version: SIDE_VERSION
    "I"  # size: of the table of sections, which follows
    "I"  # crc: CRC-32C of the table
)
SIDE_MAGIC: Final = b"kl-sides"
SIDE_VERSION: Final = 1
STORED_MIXED: Final = ".mixed"
STORED_LOG: Final = "kl-log"
STORED_BOUNDARY: Final = "boundary"
STORED_COMMITS: Final = "log"
STORED_DATA: Final = "data"
STORED_SEGMENTS: Final = "segments"
STORED_SIDE: Final = ".side"
STORED_CLAIMS: Final = "claims"
STORED_PROBE: Final = "probe"
_STORED_LAST: Final = 10**20 - 1
_STORED_NAME: Final = re.compile(r"log/([0-9]{20})\.(commit|snapshot)")
_STORED_DATA_NAME: Final = re.compile(r"(?:data|segments)/([0-9]+)/[A-Za-z0-9._-]+")


def stored_commit(number: int) -> str:
    """Return the name of a commit in an object store; the newest is listed first."""
    return f"{STORED_COMMITS}/{_STORED_LAST - number:020}.commit"


def stored_snapshot(number: int) -> str:
    """Return the name of a snapshot of the state after a commit."""
    return f"{STORED_COMMITS}/{_STORED_LAST - number:020}.snapshot"


def parse_stored_name(name: str) -> tuple[int, bool] | None:
    """Return (number, is a snapshot) of an object of the commit log, or None."""
    match = _STORED_NAME.fullmatch(name)
    return None if match is None else (_STORED_LAST - int(match[1]), match[2] == "snapshot")


def seen_by_stored(name: str) -> int:
    """Return the number of the commit that the writer of a data object had seen.

    Raises ValueError for another name.
    """
    match = _STORED_DATA_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not a data object")
    return int(match[1])


def stored_data(seen: int, attempt: str, token: str, part: int) -> str:
    """Return the name of a mixed object.

    Args:
        seen: The number of the commit that the writer of the object had seen.
        attempt: The name of the attempt's staged file, without suffix.
        token: Random, so that two attempts of one name share no object.
        part: The object's number in the attempt.
    """
    tail = f"-{part}" if part else ""
    return f"{STORED_DATA}/{seen}/{attempt.removeprefix(OURS)}-{token}{tail}{STORED_MIXED}"


def stored_segment(seen: int, topic_id: str, partition: int, base_offset: int, random: str) -> str:
    """Return the name of a segment object; `seen` is that of `stored_data`, `random` unique."""
    tail = f"{topic_id}-{partition}-{base_offset}-{random}"
    return f"{STORED_SEGMENTS}/{seen}/{tail}{LOG}"


def stored_claim(work: str, minutes: int) -> str:
    """Return the name of a claim upon some work, for ten minutes that are given by their number."""
    return f"{STORED_CLAIMS}/{work}-{minutes}"


def is_stored_segment(name: str) -> bool:
    """Return whether a name is that of a segment object; its side object's is not."""
    return name.startswith(f"{STORED_SEGMENTS}/") and name.endswith(LOG)


def is_stored_data(name: str) -> bool:
    """Return whether a name is that of an object with records, or of a side object."""
    return _STORED_DATA_NAME.fullmatch(name) is not None


def topic_of_stored(name: str) -> str:
    """Return the id of the topic of a segment object."""
    return name.rpartition("/")[2][:TOPIC_ID_TEXT_SIZE]


def stored_side(name: str) -> str:
    """Return the name of the object with the indexes of a segment object."""
    return name.removesuffix(LOG) + STORED_SIDE
