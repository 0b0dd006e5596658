//! Two-phase locking: the seeds are shared among its three protocols.

use orthodrome_protocols::two_phase_locking::{BY_AGE, PREEMPT, PREEMPT_ON_WAIT};

use super::support::{expect, hold_every_promise, seeds};

#[test]
fn seeds_with_faults_hold_every_promise_by_age() {
    let notes = hold_every_promise(BY_AGE, 0..seeds(201) / 3, 4);
    let common = ["Wounded", "ParticipantTakeover", "CoordinatorTakeover", "LockWait", "ReadWait"];
    expect(&notes, &common);
    expect(&notes, &["LaterRound"]);
}

#[test]
fn seeds_with_faults_hold_every_promise_with_preemption() {
    let notes = hold_every_promise(PREEMPT, 100_000..100_000 + seeds(201) / 3, 4);
    expect(&notes, &["Wounded", "Preempted", "LaterRound"]);
}

#[test]
fn seeds_with_faults_hold_every_promise_with_preempt_on_wait() {
    let notes = hold_every_promise(PREEMPT_ON_WAIT, 200_000..200_000 + seeds(201) / 3, 4);
    expect(&notes, &["Wounded", "PreemptedOnWait", "LaterRound"]);
}
