//! Geodesic. `ORTHODROME_FIRST_SEED` says where its seeds begin (0).

use orthodrome_protocols::geodesic::NAME;
use orthodrome_sim::swarm::FaultProfile;

use super::support::{catch, expect, from_environment, hold_every_promise, seeds};

#[test]
fn seeds_with_faults_hold_every_promise() {
    let first = from_environment("ORTHODROME_FIRST_SEED").unwrap_or(0);
    let notes = hold_every_promise(NAME, first..first + seeds(200), 4);
    let expected = [
        "Takeover",
        "Promised",
        "RecoveryStamp",
        "Preempted",
        "Waited",
        "Raised",
        "RaisedAtSecond",
        "RaisedDirect",
        "Settle",
        "Suspected",
        "TooFewForBallotZero",
        "ClockWait",
        "Fetched",
        "Stale",
        "Repaired",
        "PlaceFirst",
    ];
    expect(&notes, &expected);
}

/// Crashes that lose unsynced writes, and replicas that differ for long.
#[test]
fn mutations_that_need_lagging_replicas_are_caught() {
    for (mutation, within) in [("D1", 20), ("D7", 100), ("recovery_stamp_counts", 150), ("R11", 40)]
    {
        catch(NAME, mutation, Some(FaultProfile::LaggingReplicas), within);
    }
}
