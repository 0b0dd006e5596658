//! The golden traces of two-phase locking: one file, one behaviour
//! (`src/two_phase_locking/testdata`, a folder for each variant). Rewritten by `cargo xtask golden`.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use orthodrome_protocols::two_phase_locking::{ByAge, Locking, Preempt, PreemptOnWait};

#[test]
fn golden_traces_of_2pl() {
    orthodrome_sim::golden::run_all::<Locking<ByAge>>("src/two_phase_locking/testdata/2pl")
        .unwrap();
}

#[test]
fn golden_traces_of_2pl_p() {
    orthodrome_sim::golden::run_all::<Locking<Preempt>>("src/two_phase_locking/testdata/2pl-p")
        .unwrap();
}

#[test]
fn golden_traces_of_2pl_pow() {
    orthodrome_sim::golden::run_all::<Locking<PreemptOnWait>>(
        "src/two_phase_locking/testdata/2pl-pow",
    )
    .unwrap();
}
