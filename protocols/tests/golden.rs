//! The golden traces: one file, one behaviour, in the `testdata` of each protocol's folder; one
//! folder for each variant. Rewritten by `cargo xtask golden`.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use orthodrome_protocols::carousel::{CarouselBasic, CarouselFast};
use orthodrome_protocols::tapir::Tapir;
use orthodrome_protocols::two_phase_locking::{ByAge, Locking, Preempt, PreemptOnWait};
use orthodrome_sim::golden::run_all;

#[test]
fn golden_traces_of_carousel() {
    run_all::<CarouselBasic>("src/carousel/testdata").unwrap();
}

#[test]
fn golden_traces_of_carousel_fast() {
    run_all::<CarouselFast>("src/carousel/testdata/fast").unwrap();
}

#[test]
fn golden_traces_of_tapir() {
    run_all::<Tapir>("src/tapir/testdata").unwrap();
}

#[test]
fn golden_traces_of_2pl() {
    run_all::<Locking<ByAge>>("src/two_phase_locking/testdata/2pl").unwrap();
}

#[test]
fn golden_traces_of_2pl_p() {
    run_all::<Locking<Preempt>>("src/two_phase_locking/testdata/2pl-p").unwrap();
}

#[test]
fn golden_traces_of_2pl_pow() {
    run_all::<Locking<PreemptOnWait>>("src/two_phase_locking/testdata/2pl-pow").unwrap();
}
