//! Natto: the seeds are shared among its protocols.

use orthodrome_protocols::natto::{CP, LECSF, PA, RECSF, TS};

use super::support::{expect, hold_every_promise, seeds};

#[test]
fn seeds_with_faults_hold_every_promise_by_timestamps() {
    let notes = hold_every_promise(TS, 0..seeds(200) / 5, 4);
    let expected = [
        "CoordinatorTakeover",
        "ParticipantTakeover",
        "Late",
        "LockWait",
        "Overtaken",
        "Promoted",
        "Unmeasured",
        "FarAhead",
        "ReadWait",
    ];
    expect(&notes, &expected);
}

#[test]
fn seeds_with_faults_hold_every_promise_with_local_forwarding() {
    let notes = hold_every_promise(LECSF, 100_000..100_000 + seeds(200) / 5, 4);
    expect(&notes, &["LockWait", "Forwarded"]);
}

#[test]
fn seeds_with_faults_hold_every_promise_with_priority_abort() {
    let notes = hold_every_promise(PA, 200_000..200_000 + seeds(200) / 5, 4);
    expect(&notes, &["LockWait", "Forwarded", "PriorityAbort", "Spared"]);
}

#[test]
fn seeds_with_faults_hold_every_promise_with_conditional_prepare() {
    let notes = hold_every_promise(CP, 300_000..300_000 + seeds(200) / 5, 4);
    let expected =
        ["PriorityAbort", "Conditional", "ConditionHeld", "ConditionProved", "Provisional"];
    expect(&notes, &expected);
}

#[test]
fn seeds_with_faults_hold_every_promise_with_remote_forwarding() {
    let notes = hold_every_promise(RECSF, 400_000..400_000 + seeds(200) / 5, 4);
    expect(&notes, &["ReadForwarded", "Provisional"]);
}
