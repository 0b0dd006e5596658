//! The same scenario in the simulator and on real processes that emulate the same distances: latencies
//! must agree, or one of the two says something wrong about the other.

#![allow(
    clippy::disallowed_types,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "a test of real processes; an unmet expectation is a failed test"
)]

mod processes;

use processes::{Cluster, Load, json, run};
use serde_json::Value;

/// Transactions a second over all regions: few enough that nobody waits for anybody.
const RATE: &str = "20";
/// How far apart medians may be: the measure of the project's first issue.
const APART_MAX: f64 = 0.05;

/// One figure of both, and how far the real one is above the simulated one.
fn compare(name: &str, simulated: &Value, measured: &Value) -> f64 {
    let [simulated_p50, measured_p50] = [simulated, measured].map(|s| s["p50"].as_f64().unwrap());
    let apart = measured_p50 / simulated_p50 - 1.0;
    println!(
        "{name:9} {:>6} {simulated_p50:>9.1} ms {:>6} {measured_p50:>9.1} ms {:>+7.2} %",
        simulated["n"],
        measured["n"],
        100.0 * apart
    );
    apart
}

fn parity(cluster: &Cluster, workload: &str) {
    let scenario = ["--workload", workload, "--rate", RATE];
    let place = ["--topology", "azure5", "--partitions", "5", "--replicas", "3"];
    // Simulated time is cheap: so long that the simulated medians are exact.
    let course = ["--protocol", "carousel-basic", "--duration", "1000s", "--json"];
    let (simulated, status) = json(&run(&[&["sim"][..], &place, &scenario, &course].concat()));
    assert_eq!(status, Some(0), "{simulated}");
    let all = cluster.endpoints(cluster.numbers());
    let load = Load::start(&[&scenario[..], &["--connect", &all, "--duration", "40s"]].concat());
    let (measured, status, said) = load.finish();
    assert_eq!(status, Some(0), "{measured}\n{said}");

    println!("{workload:9} {:>19} {:>19} {:>9}", "simulated", "measured", "apart");
    let apart = compare("all", &simulated["latency_ms"]["all"], &measured["latency_ms"]["all"]);
    for (region, summary) in simulated["regions"].as_object().unwrap() {
        compare(region, summary, &measured["regions"][region]);
    }
    assert!(apart.abs() <= APART_MAX, "{workload}: medians are {:.1} % apart", 100.0 * apart);
}

#[test]
fn real_processes_are_as_fast_as_simulated_ones() {
    let mut cluster = Cluster::init(5, &["--topology", "azure5"], &[]);
    cluster.start(cluster.numbers());
    // Leaders are elected, connections open.
    let first = cluster.endpoints(cluster.numbers());
    Load::start(&[
        "--connect",
        &first,
        "--workload",
        "ycsbt:4",
        "--rate",
        "50",
        "--duration",
        "5s",
    ])
    .finish();
    for workload in ["ycsbt:4", "retwis"] {
        parity(&cluster, workload);
    }
}
