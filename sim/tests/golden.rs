//! Golden scripts of a small protocol: they test the harness that other protocols' scripts use.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "tests may panic, and are their own documentation"
)]

mod toy;

use orthodrome_sim::golden;
use toy::Toy;

#[test]
fn scripts() {
    golden::run_all::<Toy>("toy", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden")).unwrap();
}

#[test]
fn a_script_is_refused_with_a_reason() {
    let reason = |script: &str| golden::generate::<Toy>("toy", script).unwrap_err().to_string();
    assert!(reason("begin n4 c1.1 read=a\n---\n").contains("no cluster yet"));
    assert!(reason("cluster\njump\n---\n").contains("\"jump\" is no command"));
    assert!(reason("cluster mutation=x\n---\n").contains("not a mutation"));
    assert!(reason("cluster\ndeliver\n---\n").contains("`steps`"));
    assert!(reason("cluster steps\ncrash n9\n---\n").contains("n9 is not in the cluster"));
    assert!(reason("cluster\nrun for=1 now\n---\n").contains("now"));
}
