//! The golden traces: one file, one behaviour, in `src/simulated/testdata` and `src/scalardb/testdata`; one folder for each
//! variant. Rewritten by `cargo xtask golden`.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use orthodrome_geotp::scalardb::{SCALARDB, SCALARDB_PLUS, ScalarDb};
use orthodrome_geotp::simulated::{CHILLER, GeoTp, NEAR, O1, O2, O3, QURO, XA, XA_LOCAL};
use orthodrome_sim::golden::run_all;

fn golden(name: &'static str) {
    run_all::<GeoTp>(name, format!("src/simulated/testdata/{name}")).unwrap();
}

#[test]
fn golden_traces_of_geotp_o1() {
    golden(O1);
}

#[test]
fn golden_traces_of_geotp_o2() {
    golden(O2);
}

#[test]
fn golden_traces_of_geotp() {
    golden(O3);
}

#[test]
fn golden_traces_of_near() {
    golden(NEAR);
}

#[test]
fn golden_traces_of_xa() {
    golden(XA);
}

#[test]
fn golden_traces_of_xa_local() {
    golden(XA_LOCAL);
}

#[test]
fn golden_traces_of_quro() {
    golden(QURO);
}

#[test]
fn golden_traces_of_chiller() {
    golden(CHILLER);
}

fn scalardb(name: &'static str) {
    run_all::<ScalarDb>(name, format!("src/scalardb/testdata/{name}")).unwrap();
}

#[test]
fn golden_traces_of_scalardb() {
    scalardb(SCALARDB);
}

#[test]
fn golden_traces_of_scalardb_plus() {
    scalardb(SCALARDB_PLUS);
}
