"""`docs/conformance.md` lists every rule and every test of Kafka's once, and tests that exist.

So it does with the options and the tests of Spark's Kafka source. What must be listed stands here:
the numbers of the rules by heading, and the names of Kafka's tests by class; Spark's are in
`spark_suites`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT
from tests.spark_suites import OPTIONS, SUITES

TESTS = ROOT / "tests"
DOCUMENT = ROOT / "docs" / "conformance.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")
SHARE = 0.95

RULES = {
    "1.1": 9, "1.2": 5, "1.3": 9, "1.4": 4, "1.5": 3, "1.6": 6, "1.7": 5, "1.8": 7, "1.9": 5,
    "1.10": 4, "1.11": 6, "1.12": 4, "1.13": 4, "1.14": 7, "1.15": 6, "3.5": 6,
}  # fmt: skip
"""Rules without a name of their own: `1.1` has 1.1.1 to 1.1.9."""
SERIES = {"C": 141, "K": 8, "R": 15, "P": 10, "L": 15, "F": 9, "G": 10, "D": 9}
KAFKAS = {
    "LogSegmentTest": """
        testAppendForLogSegmentOffsetOverflowException testReadOnEmptySegment
        testReadBeforeFirstOffset testReadAfterLast testReadFromGap testReadWhenNoMaxPosition
        testTruncate testTruncateEmptySegment
        testReloadLargestTimestampAndNextOffsetAfterTruncation testTruncateFull
        testFindOffsetByTimestamp testNextOffsetCalculation testChangeFileSuffixes
        testRecoveryFixesCorruptIndex testRecoverTransactionIndex testRecoveryRebuildsEpochCache
        testRecoveryFixesCorruptTimeIndex testRecoveryWithCorruptMessage
        testCreateWithInitFileSizeAppendMessage testCreateWithInitFileSizeClearShutdown
        shouldTruncateEvenIfOffsetPointsToAGapInTheLog testAppendFromFile
        testGetFirstBatchTimestamp testDeleteIfExistsWithGetParentIsNull
    """,
    "OffsetIndexTest": """
        testEntry testEntryOverflow testFetchUpperBoundOffset testReopen
        testSanityLastOffsetEqualToBaseOffset
    """,
    "TimeIndexTest": """
        testLookUp testEntry testEntryOverflow testTruncate testAppend testSanityCheck testIsFull
        testLastEntry testResize testEntrySize testParseEntry
    """,
    "TransactionIndexTest": """
        testPositionSetCorrectlyWhenOpened testSanityCheck testLastOffsetMustIncrease
        testLastOffsetCannotDecrease testCollectAbortedTransactions testTruncate
        testAbortedTxnSerde testRenameIndex testUpdateParentDir testFlush testDeleteIfExists
    """,
    "MemoryRecordsTest": """
        testIterator testHasRoomForMethod testHasRoomForMethodWithHeaders testChecksum
        testFilterToPreservesPartitionLeaderEpoch testFilterToEmptyBatchRetention
        testEmptyBatchRetention testEmptyBatchDeletion testBuildEndTxnMarker
        testBaseTimestampToDeleteHorizonConversion testBuildLeaderChangeMessage
        testFilterToBatchDiscard testFilterToAlreadyCompactedLog testFilterToPreservesProducerInfo
        testFilterToWithUndersizedBuffer testFilterTo testFilterToPreservesLogAppendTime
        testNextBatchSize testWithRecords testUnsupportedCompress
    """,
    "LogLoaderTest": """
        testLogRecoveryIsCalledUponBrokerCrash testProducerSnapshotsRecoveryAfterUncleanShutdownV1
        testProducerSnapshotsRecoveryAfterUncleanShutdownCurrentMessageFormat
        testSkipLoadingIfEmptyProducerStateBeforeTruncation
        testRecoverAfterNonMonotonicCoordinatorEpochWrite
        testSkipTruncateAndReloadIfOldMessageFormatAndNoCleanShutdown
        testSkipTruncateAndReloadIfOldMessageFormatAndCleanShutdown
        testSkipTruncateAndReloadIfNewMessageFormatAndCleanShutdown
        testLoadProducersAfterDeleteRecordsMidSegment
        testLoadingLogKeepsLargestStrayProducerStateSnapshot
        testLoadProducersAfterDeleteRecordsOnSegment testLogRecoversToCorrectOffset
        testIndexRebuild testRebuildTimeIndexForOldMessages testCorruptIndexRebuild
        testBogusIndexSegmentsAreRemoved testReopenThenTruncate testOpenDeletesObsoleteFiles
        testCorruptLog testOverCompactedLogRecovery
        testLeaderEpochCacheClearedAfterStaticMessageFormatDowngrade
        testOverCompactedLogRecoveryMultiRecord testOverCompactedLogRecoveryMultiRecordV1
        testRecoveryOfSegmentWithOffsetOverflow testRecoveryAfterCrashDuringSplitPhase1
        testRecoveryAfterCrashDuringSplitPhase2 testRecoveryAfterCrashDuringSplitPhase3
        testRecoveryAfterCrashDuringSplitPhase4 testRecoveryAfterCrashDuringSplitPhase5
        testCleanShutdownFile testLogRecoversForLeaderEpoch testFullTransactionIndexRecovery
        testRecoverOnlyLastSegment testRecoverLastSegmentWithNoSnapshots
        testLogEndLessThanStartAfterReopen
        testCorruptedLogRecoveryDoesNotDeleteProducerStateSnapshotsPostRecovery
        testRecoverWithEmptyActiveSegment testLogStartOffsetWhenRemoteStorageIsEnabled
    """,
    "LogCleanerTest": """
        testRemoveMetricsOnClose testMetricsActiveAfterReconfiguration testCleanSegments
        testCleanSegmentsWithConcurrentSegmentDeletion
        testSizeTrimmedForPreallocatedAndCompactedTopic testDuplicateCheckAfterCleaning
        testMultiPassSegmentCleaningWithAbortedTransactions testBasicTransactionAwareCleaning
        testCleanWithTransactionsSpanningSegments testCommitMarkerRemoval
        testDeletedBatchesWithNoMessagesRead testCommitMarkerRetentionWithEmptyBatch
        testCleanEmptyControlBatch testCommittedTransactionSpanningSegments
        testAbortedTransactionSpanningSegments testAbortMarkerRemoval
        testEmptyBatchRemovalWithSequenceReuse testAbortMarkerRetentionWithEmptyBatch
        testLargeMessage testMessageLargerThanMaxMessageSize
        testMessageLargerThanMaxMessageSizeWithCorruptHeader
        testCorruptMessageSizeLargerThanBytesAvailable testCleaningWithDeletes testLogCleanerStats
        testLogCleanerRetainsProducerLastSequence
        testLogCleanerRetainsLastSequenceEvenIfTransactionAborted
        testCleaningWithKeysConflictingWithTxnMarkerKeys testPartialSegmentClean
        testCleaningWithUncleanableSection testLogToClean testLogToCleanWithUncleanableSection
        testCleaningWithUnkeyedMessages testCleanSegmentsWithAbort
        testCleanSegmentsRetainingLastEmptyBatch testSegmentGrouping
        testSegmentGroupingWithSparseOffsetsAndEmptySegments testSegmentGroupingWithSparseOffsets
        testSegmentGroupingFollowingLoadOfZeroIndex testBuildOffsetMap
        testSegmentWithOffsetOverflow testRecoveryAfterCrash testBuildOffsetMapFakeLarge
        testBuildPartialOffsetMap testCleanCorruptMessageSet testClientHandlingOfCorruptMessageSet
        testCleanTombstone testCleaningBeyondMissingOffsets testMaxCleanTimeSecs
        testReconfigureLogCleanerIoMaxBytesPerSecond testCleanedSegmentSizeOverflow
        testCleanedSegmentOffsetOverflow testCleanSegmentsNotRetainingLastEmptyBatch
        testMaxBufferUtilizationPercentMetric testMaxCleanTimeMetric testMaxCompactionDelayMetrics
    """,
    "OffsetMapTest": """
        testBasicValidation testClear testGetWhenFull testUpdateLatestOffset testLatestOffset
        testUtilization
    """,
    "LogCleanerManagerTest": """
        testGrabFilthiestCompactedLogThrowsException
        testGrabFilthiestCompactedLogReturnsLogWithDirtiestRatio
        testGrabFilthiestCompactedLogIgnoresUncleanablePartitions
        testGrabFilthiestCompactedLogIgnoresInProgressPartitions
        testGrabFilthiestCompactedLogIgnoresBothInProgressPartitionsAndUncleanablePartitions
        testDirtyOffsetResetIfLargerThanEndOffset testDirtyOffsetResetIfSmallerThanStartOffset
        testLogStartOffsetLargerThanActiveSegmentBaseOffset
        testDirtyOffsetLargerThanActiveSegmentBaseOffset
        testLogsWithSegmentsToDeleteShouldNotConsiderCleanupPolicyDeleteLogs
        testLogsWithSegmentsToDeleteShouldConsiderCleanupPolicyCompactDeleteLogs
        testLogsWithSegmentsToDeleteShouldConsiderCleanupPolicyCompactLogs
        testLogsUnderCleanupIneligibleForCompaction
        testUpdateCheckpointsShouldAddOffsetToPartition
        testUpdateCheckpointsShouldRemovePartitionData
        testHandleLogDirFailureShouldRemoveDirAndData
        testMaybeTruncateCheckpointShouldTruncateData
        testAlterCheckpointDirShouldRemoveDataInSrcDirAndAddInNewDir
        testConcurrentLogCleanupAndLogTruncation testConcurrentLogCleanupAndTopicDeletion
        testLogsWithSegmentsToDeleteShouldNotConsiderUncleanablePartitions
        testCleanableOffsetsForNone testCleanableOffsetsActiveSegment testCleanableOffsetsForTime
        testCleanableOffsetsForShortTime testCleanableOffsetsNeedsCheckpointReset
        testUndecidedTransactionalDataNotCleanable testDoneCleaning testDoneDeleting
        testCheckpointUpdatedForInvalidOffsetNoCleaning
        testCheckpointUpdatedForInvalidOffsetNotSelected
    """,
    "LogCleanerIntegrationTest": """
        testMarksPartitionsAsOfflineAndPopulatesUncleanableMetrics testMaxLogCompactionLag
        testIsThreadFailed
    """,
    "LogCleanerParameterizedIntegrationTest": """
        cleanerTest testCleansCombinedCompactAndDeleteTopic testCleanerWithMessageFormatV0
        testCleaningNestedMessagesWithV0AndV1 cleanerConfigUpdateTest
    """,
    "LogCleanerLagIntegrationTest": "cleanerTest",
}
SPARKS_OPTIONS = "Spark's options"
LISTED = {
    **{kafkas: names.split() for kafkas, names in KAFKAS.items()},
    SPARKS_OPTIONS: OPTIONS,
    **SUITES,
}
"""What is listed by name, and not by number, under its heading."""
TITLES = {"Rule", "Kafka's test", "Spark's test", "Option"}


@dataclass(frozen=True)
class Row:
    """A line of a table: a rule or a test of Kafka's, and what there is of it here."""

    heading: str
    name: str
    answer: str

    @property
    def tests(self) -> list[tuple[Path, str]]:
        return [
            (TESTS / (file if "/" in file else f"unit/storage_engine/{file}"), name)
            for file, name in NAMED.findall(self.answer)
        ]

    @property
    def cannot_apply(self) -> bool:
        return self.answer.startswith("n/a: ")

    @property
    def is_missing(self) -> bool:
        return self.answer.startswith("not yet: ")


@cache
def rows() -> list[Row]:
    found = []
    heading = ""
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("| ") and heading:
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found.append(Row(heading, cells[0].strip("`"), cells[-1]))
    return [row for row in found if row.name not in TITLES]


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_rule_is_listed_once() -> None:
    expected = [f"{group}.{n + 1}" for group, count in RULES.items() for n in range(count)]
    expected += [f"{letter}{n + 1}" for letter, count in SERIES.items() for n in range(count)]
    found = [row.name for row in rows() if row.heading not in LISTED]
    assert Counter(found) == Counter(expected)


@pytest.mark.parametrize("heading", LISTED)
def test_every_test_and_option_is_listed_once(heading: str) -> None:
    found = [row.name for row in rows() if row.heading == heading]
    assert Counter(found) == Counter(LISTED[heading])


def test_every_line_names_tests_or_a_reason() -> None:
    bare = [
        row.name
        for row in rows()
        if not row.tests and not ((row.cannot_apply or row.is_missing) and len(row.answer) > 20)
    ]
    assert bare == []


def test_every_test_that_is_named_exists() -> None:
    lost = [
        f"{row.name}: {path.name}::{name}"
        for row in rows()
        for path, name in row.tests
        if not path.exists() or name not in functions(path)
    ]
    assert lost == []


def counted(listed: list[Row]) -> tuple[int, int, int, int, int]:
    """How many are listed, apply, pass, cannot apply, and are missing."""
    outside = sum(row.cannot_apply for row in listed)
    missing = sum(row.is_missing for row in listed)
    apply = len(listed) - outside
    return len(listed), apply, apply - missing, outside, missing


def test_enough_of_what_applies_passes_and_the_document_counts_right() -> None:
    parts = {
        "Rules": [row for row in rows() if row.heading not in LISTED],
        **{heading: [row for row in rows() if row.heading == heading] for heading in LISTED},
        "All": rows(),
    }
    text = DOCUMENT.read_text().split("\n## ")[0]
    for title, listed in parts.items():
        _, apply, passing, _, _ = figures = counted(listed)
        assert passing >= SHARE * apply, title
        assert f"| {title} | " + " | ".join(map(str, figures)) + " |" in text
