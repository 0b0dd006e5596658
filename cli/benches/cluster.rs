//! Processor time of servers for each transaction. Three real processes run on loopback without
//! emulated distance, and a fourth process puts load on them. The result is the number of committed
//! transactions by the processor time of the three.

#![allow(
    clippy::disallowed_types,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    missing_docs,
    reason = "a benchmark of real processes"
)]

#[path = "../tests/processes/mod.rs"]
mod processes;

use std::time::Duration;

use processes::{Cluster, Load};

/// Length of each measurement in seconds.
const SECONDS: u64 = 10;

/// A workload, and the number of clients that submit it.
struct Case {
    name: &'static str,
    workload: &'static str,
    clients: &'static str,
}

const CASES: [Case; 3] = [
    Case { name: "one partition (1 key)", workload: "ycsbt:1", clients: "64" },
    Case { name: "three partitions (6 keys)", workload: "ycsbt:6", clients: "64" },
    Case { name: "one client alone, 6 keys", workload: "ycsbt:6", clients: "1" },
];

fn measure(cluster: &Cluster, durability: &str, case: &Case) {
    let all = cluster.endpoints(cluster.numbers());
    let duration = format!("{}s", SECONDS + 3);
    let load = Load::start(&[
        "--connect",
        &all,
        "--workload",
        case.workload,
        "--clients",
        case.clients,
        "--duration",
        &duration,
        "--no-check",
    ]);
    // The start is not measured.
    load.commits(1);
    let before = (load.committed(), cluster.cpu());
    std::thread::sleep(Duration::from_secs(SECONDS));
    // Both counts are of the last full second, so their difference is exact.
    let after = (load.committed(), cluster.cpu());
    let (result, status, said) = load.finish();
    assert_eq!(status, Some(0), "{result}\n{said}");
    let (committed, cpu) = ((after.0 - before.0) as f64, (after.1 - before.1).as_secs_f64());
    println!(
        "{durability:8} {:27} {:>8.0} txn/CPU-s {:>8.0} µs/txn {:>8.0} txn/s  p50 {:>6.2} ms",
        case.name,
        committed / cpu,
        cpu / committed * 1e6,
        committed / SECONDS as f64,
        result["latency_ms"]["all"]["p50"].as_f64().unwrap()
    );
}

fn main() {
    // `cargo bench NAME` runs the benchmarks whose name contains NAME; `cargo test --benches` runs
    // none.
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |argument: &String| argument.starts_with('-') || "cluster".contains(&**argument);
    if !arguments.iter().all(wanted) || arguments.iter().any(|argument| argument == "--test") {
        return;
    }
    for durability in ["sync", "process", "none"] {
        let setting = format!("durability = \"{durability}\"");
        let changes =
            [("emulate_wan = true", "emulate_wan = false"), ("#durability = \"sync\"", &*setting)];
        let place = ["--topology", "local3", "--partitions", "3"];
        let mut cluster = Cluster::init(3, &place, &changes);
        cluster.start(cluster.numbers());
        for case in &CASES {
            measure(&cluster, durability, case);
        }
    }
}
