//! Operators who change the members of partitions of geodesic: one member at a time, by a copy.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_eval::workload;
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Report, Schedule};

use super::support::expect;

/// A run on five regions with two servers each, measured for 8 s after `warmup` seconds. Partition 0
/// begins at n1, n3 and n5, or at n1, n3, n5, n7 and n9.
fn run(replicas: u32, warmup: u64, schedule: &str) -> Report {
    let map = Topology::built_in("local5").unwrap();
    let cluster = Cluster::spread(map, 2, 1, 1, replicas).unwrap();
    let workload = workload::parse("list-append", &workload::Options::default()).unwrap();
    let options = Options {
        load: LoadModel {
            arrival: Arrival::Open { per_second: 60.0, poisson: true },
            ..LoadModel::default()
        },
        warmup: Duration::from_secs(warmup),
        duration: Duration::from_secs(warmup + 8),
        check_outcomes: true,
        ..Options::default()
    };
    let schedule = Schedule::parse(schedule).unwrap();
    let subject = orthodrome_lab::find("geodesic").unwrap();
    let mut simulation = subject.simulation(cluster, workload, &schedule, options, None).unwrap();
    simulation.run().unwrap_or_else(|failure| panic!("{failure}"))
}

fn states(report: &Report) -> Vec<&'static str> {
    report.orders.iter().map(|order| order.state).collect()
}

fn order(at_ms: u64, voters: &[&str]) -> String {
    format!(
        "[[faults]]\nat_ms = {at_ms}\nfault.change-members = {{ partition = 0, voters = {voters:?} }}\n"
    )
}

fn crash(at_ms: u64, until_ms: Option<u64>, nodes: &[&str]) -> String {
    let until = until_ms.map_or_else(String::new, |until| format!("until_ms = {until}\n"));
    format!("[[faults]]\nat_ms = {at_ms}\n{until}fault.crash = {{ nodes = {nodes:?} }}\n")
}

#[test]
fn a_server_takes_the_place_of_another_while_transactions_go_on() {
    let report = run(3, 1, &order(2_000, &["n1", "n3", "n6"]));
    assert_eq!(states(&report), ["finished"], "{:?}", report.orders);
    let result = &report.result;
    // One of three regions changes its server; the others serve meanwhile.
    assert!(result.committed > 400, "{} committed", result.committed);
}

/// The one that is dead leaves, then another one dies: a majority needs the new one.
#[test]
fn a_dead_member_is_replaced() {
    let schedule = crash(1_000, None, &["n1"])
        + &order(2_000, &["n2", "n3", "n5"])
        + &crash(12_000, None, &["n3"]);
    let report = run(3, 13, &schedule);
    assert_eq!(states(&report), ["finished"], "{:?}", report.orders);
    assert!(report.result.committed > 100, "{} committed", report.result.committed);
}

#[test]
fn all_members_are_replaced_one_after_the_other() {
    for (replicas, target) in
        [(3, vec!["n2", "n4", "n6"]), (5, vec!["n2", "n4", "n6", "n8", "n10"])]
    {
        let report = run(replicas, 35, &order(2_000, &target));
        assert_eq!(states(&report), ["finished"], "{:?}", report.orders);
        assert!(report.result.committed > 100, "{} committed", report.result.committed);
    }
}

/// None of the first members runs any more, and gateways know only the placement.
#[test]
fn gateways_that_start_again_find_a_partition_whose_first_members_are_gone() {
    let schedule = order(2_000, &["n2", "n4", "n6"])
        + &crash(25_000, None, &["n1", "n3", "n5"])
        + &crash(26_000, Some(26_200), &["n11", "n12", "n13", "n14", "n15"]);
    let report = run(3, 30, &schedule);
    assert!(report.result.committed > 100, "{} committed", report.result.committed);
}

/// The member that took the order dies after the first step; the others go on with it.
#[test]
fn an_order_outlives_the_member_that_took_it() {
    let schedule = order(2_000, &["n2", "n4", "n5"]) + &crash(9_500, None, &["n1"]);
    let report = run(3, 30, &schedule);
    assert!(report.result.committed > 100, "{} committed", report.result.committed);
}

#[test]
fn everybody_starts_again_while_the_new_member_copies() {
    let all = ["n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9", "n10"];
    let schedule = order(2_000, &["n1", "n3", "n6"]) + &crash(3_500, Some(3_900), &all);
    let report = run(3, 20, &schedule);
    assert!(report.result.committed > 100, "{} committed", report.result.committed);
    assert_eq!(states(&report), ["unknown"], "who took it has started again: {:?}", report.orders);
}

#[test]
fn of_two_orders_at_once_one_is_carried_out_and_the_other_one_fails() {
    let schedule = order(2_000, &["n1", "n3", "n6"]) + &order(2_000, &["n1", "n4", "n5"]);
    let report = run(3, 20, &schedule);
    let mut states = states(&report);
    states.sort_unstable();
    assert_eq!(states, ["failed", "finished"], "{:?}", report.orders);
}

#[test]
fn orders_that_geodesic_cannot_carry_out_say_why() {
    for (replicas, voters, why) in [
        (3, vec!["n1", "n3"], "p0 has 3 replicas, and geodesic does not change their number"),
        (3, vec!["n1", "n3", "n5", "n7", "n9"], "geodesic does not change their number"),
        (1, vec!["n2"], "nobody else could send a copy"),
    ] {
        let report = run(replicas, 1, &order(2_000, &voters));
        assert_eq!(states(&report), ["failed"], "{:?}", report.orders);
        assert!(report.orders[0].detail.contains(why), "{}", report.orders[0].detail);
    }
}

#[test]
fn the_notes_of_a_move_are_told() {
    let report = run(3, 1, &order(2_000, &["n1", "n3", "n6"]));
    expect(&report.notes, &["Moved", "Outdated", "Elected", "Rejoining", "Rejoined"]);
}
