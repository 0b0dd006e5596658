//! Geodesic. `ORTHODROME_FIRST_SEED` says where its seeds begin (0).

use orthodrome_protocols::geodesic::NAME;

use super::support::{expect, from_environment, hold_every_promise, seeds};

#[test]
fn seeds_with_faults_hold_every_promise() {
    let first = from_environment("ORTHODROME_FIRST_SEED").unwrap_or(0);
    let mut notes = hold_every_promise(NAME, first..first + seeds(200), 4);
    // Answers that take longer than time-outs (290, 117); a partition that never heard of a transaction
    // whose client needs no answer any more (71), while a region is dead (281); only one replica
    // remembers an end (657, 1387); a caller that could have missed its own write (92000004); a node that
    // started again with another ceiling for each partition (120000286).
    let cases =
        [290, 81_000_071, 81_000_117, 81_000_281, 81_000_657, 81_001_387, 92_000_004, 120_000_286];
    // A server that lost its disk dies for good right after it has rejoined (131); its questions arrive
    // twice (223); peers know a transaction without what it does (252), or one of them had promised
    // together with the lost disk (1082).
    let lost = [5_000_000_131, 5_000_000_223, 5_000_000_252, 5_000_001_082];
    let cases = cases.into_iter().chain(lost);
    for seed in cases {
        notes.extend(hold_every_promise(NAME, seed..seed + 1, 4));
    }
    let expected = [
        "Takeover",
        "Promised",
        "RecoveryStamp",
        "Preempted",
        "Waited",
        "Raised",
        "RaisedAtSecond",
        "Settle",
        "Suspected",
        "TooFewForBallotZero",
        "ClockWait",
        "Fetched",
        "Shortened",
        "Rejoined",
        "Barred",
        "TooOld",
        "Moved",
        "Elected",
        "Outdated",
    ];
    expect(&notes, &expected);
}
