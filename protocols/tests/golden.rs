//! The golden traces: one file, one behaviour, in the `testdata` of each protocol's folder; one
//! folder for each variant. Rewritten by `cargo xtask golden`.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use orthodrome_protocols::carousel::{BASIC, Carousel, FAST};
use orthodrome_protocols::deterministic::{CALVIN, Deterministic, SLOG, SLOG_CONSENSUS, SLOTH};
use orthodrome_protocols::natto::{CP, LECSF, Natto, PA, RECSF, TS};
use orthodrome_protocols::ocean_vista::{self, OceanVista};
use orthodrome_protocols::tapir::{self, Tapir};
use orthodrome_protocols::two_phase_locking::{BY_AGE, Locking, PREEMPT, PREEMPT_ON_WAIT};
use orthodrome_sim::golden::run_all;

#[test]
fn golden_traces_of_carousel() {
    run_all::<Carousel>(BASIC, "src/carousel/testdata").unwrap();
}

#[test]
fn golden_traces_of_carousel_fast() {
    run_all::<Carousel>(FAST, "src/carousel/testdata/fast").unwrap();
}

#[test]
fn golden_traces_of_tapir() {
    run_all::<Tapir>(tapir::NAME, "src/tapir/testdata").unwrap();
}

#[test]
fn golden_traces_of_ocean_vista() {
    run_all::<OceanVista>(ocean_vista::NAME, "src/ocean_vista/testdata").unwrap();
}

#[test]
fn golden_traces_of_calvin() {
    run_all::<Deterministic>(CALVIN, "src/deterministic/testdata/calvin").unwrap();
}

#[test]
fn golden_traces_of_slog() {
    run_all::<Deterministic>(SLOG, "src/deterministic/testdata/slog").unwrap();
}

#[test]
fn golden_traces_of_slog_consensus() {
    let folder = "src/deterministic/testdata/slog-consensus";
    run_all::<Deterministic>(SLOG_CONSENSUS, folder).unwrap();
}

#[test]
fn golden_traces_of_sloth() {
    run_all::<Deterministic>(SLOTH, "src/deterministic/testdata/sloth").unwrap();
}

#[test]
fn golden_traces_of_2pl() {
    run_all::<Locking>(BY_AGE, "src/two_phase_locking/testdata/2pl").unwrap();
}

#[test]
fn golden_traces_of_2pl_p() {
    run_all::<Locking>(PREEMPT, "src/two_phase_locking/testdata/2pl-p").unwrap();
}

#[test]
fn golden_traces_of_2pl_pow() {
    run_all::<Locking>(PREEMPT_ON_WAIT, "src/two_phase_locking/testdata/2pl-pow").unwrap();
}

#[test]
fn golden_traces_of_natto_ts() {
    run_all::<Natto>(TS, "src/natto/testdata/ts").unwrap();
}

#[test]
fn golden_traces_of_natto_lecsf() {
    run_all::<Natto>(LECSF, "src/natto/testdata/lecsf").unwrap();
}

#[test]
fn golden_traces_of_natto_pa() {
    run_all::<Natto>(PA, "src/natto/testdata/pa").unwrap();
}

#[test]
fn golden_traces_of_natto_cp() {
    run_all::<Natto>(CP, "src/natto/testdata/cp").unwrap();
}

#[test]
fn golden_traces_of_natto_recsf() {
    run_all::<Natto>(RECSF, "src/natto/testdata/recsf").unwrap();
}
