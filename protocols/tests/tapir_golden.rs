//! The golden traces of TAPIR: one file, one behaviour (`src/tapir/testdata`). Rewritten by
//! `cargo xtask golden`.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use orthodrome_protocols::tapir::Tapir;

#[test]
fn golden_traces_of_tapir() {
    orthodrome_sim::golden::run_all::<Tapir>("src/tapir/testdata").unwrap();
}
