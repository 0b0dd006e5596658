//! Operators who change the members of partitions.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_eval::workload;
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::simulation::Simulated;
use orthodrome_sim::swarm::SwarmOptions;
use orthodrome_sim::{Fault, Options, Report, Schedule, ScheduleError};

/// Every family whose members an operator may change and whose gateways look for leaders.
const FAMILIES: [&str; 4] = ["carousel-basic", "carousel-fast", "natto-recsf", "2pl"];

/// A run on five regions with two servers each, measured from the seventh second on.
fn simulation(name: &str, schedule: &str) -> Result<Box<dyn Simulated>, ScheduleError> {
    let map = Topology::built_in("local5").unwrap();
    let partitions = if name == "carousel-fast" { 5 } else { 1 };
    let cluster = Cluster::spread(map, 2, 1, partitions, 3).unwrap();
    let workload = workload::parse("ycsbt", &workload::Options::default()).unwrap();
    let options = Options {
        load: LoadModel {
            arrival: Arrival::Open { per_second: 60.0, poisson: true },
            ..LoadModel::default()
        },
        warmup: Duration::from_secs(7),
        duration: Duration::from_secs(9),
        check_outcomes: true,
        ..Options::default()
    };
    let schedule = Schedule::parse(schedule).unwrap();
    let subject = orthodrome_lab::find(name).unwrap();
    subject.simulation(cluster, workload, &schedule, options, None)
}

fn run(name: &str, schedule: &str) -> Report {
    simulation(name, schedule).unwrap().run().unwrap_or_else(|failure| panic!("{name}: {failure}"))
}

/// Partition 0 begins at n1, n3 and n5.
const MOVED_OFF: &str = r#"
    [[faults]]
    at_ms = 2000
    fault.change-members = { partition = 0, voters = ["n2", "n4", "n6"] }
"#;

#[test]
fn a_partition_moved_off_all_its_first_servers_is_reached() {
    for name in FAMILIES {
        let report = run(name, MOVED_OFF);
        let orders: Vec<_> = report.orders.iter().map(|order| order.state).collect();
        assert_eq!(orders, ["finished"], "{name}: {:?}", report.orders);
        assert!(report.result.committed > 50, "{name}: {} committed", report.result.committed);
    }
}

/// Calvin has one log for all partitions. An order for another partition was ignored, and servers
/// named a leader that does not exist.
#[test]
fn an_order_for_a_partition_without_a_log_of_its_own_fails() {
    let schedule = r#"
        [[faults]]
        at_ms = 2000
        fault.change-members = { partition = 1, voters = ["n2", "n4", "n6"] }
        [[faults]]
        at_ms = 3000
        fault.change-members = { partition = 0, voters = ["n2", "n4", "n6"] }
    "#;
    let map = Topology::built_in("local5").unwrap();
    let cluster = Cluster::spread(map, 2, 1, 3, 3).unwrap();
    let workload = workload::parse("ycsbt", &workload::Options::default()).unwrap();
    let options = Options {
        warmup: Duration::from_secs(1),
        duration: Duration::from_secs(6),
        check_outcomes: true,
        ..Options::default()
    };
    let subject = orthodrome_lab::find("calvin").unwrap();
    let schedule = Schedule::parse(schedule).unwrap();
    let mut run = subject.simulation(cluster, workload, &schedule, options, None).unwrap();
    let orders = run.run().unwrap().orders;
    let states: Vec<_> = orders.iter().map(|order| order.state).collect();
    assert_eq!(states, ["failed", "finished"], "{orders:?}");
    assert_eq!(orders[0].detail, "p1 has no log of its own; give the order for p0");
}

/// Each voter of the next group but one is new.
#[test]
fn groups_of_one_two_three_five_and_seven_voters_follow_each_other() {
    let groups = [
        r#"["n1"]"#,
        r#"["n2", "n4"]"#,
        r#"["n1", "n4", "n5"]"#,
        r#"["n2", "n3", "n6", "n8", "n10"]"#,
        r#"["n1", "n2", "n3", "n4", "n5", "n7", "n9"]"#,
        r#"["n6"]"#,
    ];
    let order = |(at, voters): (usize, &&str)| {
        let at_ms = 1_500 + 1_200 * at;
        format!(
            "[[faults]]\nat_ms = {at_ms}\nfault.change-members = {{ partition = 0, voters = {voters} }}\n"
        )
    };
    let schedule: String = groups.iter().enumerate().map(order).collect();
    for name in FAMILIES {
        let report = run(name, &schedule);
        let orders: Vec<_> = report.orders.iter().map(|order| order.state).collect();
        assert_eq!(orders, ["finished"; 6], "{name}: {:?}", report.orders);
        assert!(report.result.committed > 50, "{name}: {} committed", report.result.committed);
    }
}

/// Every gateway starts again after the move and has only the placement.
#[test]
fn gateways_that_start_again_reach_a_partition_that_has_moved() {
    let schedule = format!(
        r#"{MOVED_OFF}
        [[faults]]
        at_ms = 4000
        until_ms = 4200
        fault.crash = {{ nodes = ["n11", "n12", "n13", "n14", "n15"] }}"#
    );
    for name in FAMILIES {
        let report = run(name, &schedule);
        assert!(report.result.committed > 50, "{name}: {} committed", report.result.committed);
    }
}

/// As above, and none of the first servers runs any more.
#[test]
fn a_partition_whose_first_servers_are_gone_is_found() {
    let schedule = format!(
        r#"{MOVED_OFF}
        [[faults]]
        at_ms = 3500
        fault.crash = {{ nodes = ["n1", "n3", "n5"] }}
        [[faults]]
        at_ms = 4000
        until_ms = 4200
        fault.crash = {{ nodes = ["n11", "n12", "n13", "n14", "n15"] }}"#
    );
    for name in ["carousel-basic", "natto-recsf", "2pl"] {
        let report = run(name, &schedule);
        assert!(report.result.committed > 50, "{name}: {} committed", report.result.committed);
    }
}

#[test]
fn carousel_fast_has_its_fast_path_after_a_voter_was_replaced() {
    let one = |voters: &str, partition| {
        format!(
            "[[faults]]\nat_ms = 2000\nfault.change-members = {{ partition = {partition}, \
             voters = [{voters}] }}\n"
        )
    };
    let schedule = one(r#""n1", "n3", "n6""#, 0) + &one(r#""n3", "n5", "n8""#, 1);
    let report = run("carousel-fast", &schedule);
    let fast = report.result.path.get("fast").copied().unwrap_or(0);
    let all: u64 = report.result.path.values().sum();
    assert!(fast * 2 > all, "{fast} of {all} were fast: {:?}", report.result.path);
}

#[test]
fn a_voter_of_a_replicated_log_cannot_lose_its_disk() {
    let replaced = r#"
        [[faults]]
        at_ms = 2000
        until_ms = 2500
        fault.replace = { nodes = ["n3"] }
    "#;
    for name in FAMILIES {
        let error = simulation(name, replaced).err().unwrap().to_string();
        assert!(error.contains("fault 1 at 2000 ms") && error.contains("n3"), "{error}");
        assert!(error.contains("fault.change-members"), "it says what to do: {error}");
    }
    let gateway = replaced.replace("n3", "n11");
    assert!(simulation("carousel-basic", &gateway).is_ok(), "a gateway keeps nothing");
    assert!(simulation("ocean-vista", &replaced.replace("n3", "n10")).is_ok());
}

/// What the seeds of one protocol order.
#[derive(Default, Debug)]
struct Orders {
    repeated: u32,
    disjoint: u32,
    at_once: u32,
    sizes: OrdSet<usize>,
    with_transfer: u32,
}

impl Orders {
    /// Counts the orders of one seed.
    fn count(&mut self, schedule: &Schedule, cluster: &Cluster) {
        let mut now: OrdMap<u32, Vec<String>> = cluster
            .partitions()
            .map(|p| (p.id.0, p.replicas.iter().map(ToString::to_string).collect()))
            .collect();
        let mut moments: OrdMap<u64, OrdSet<u32>> = OrdMap::new();
        let mut faults: Vec<_> = schedule.faults.iter().collect();
        faults.sort_by_key(|entry| entry.at_ms);
        for entry in faults {
            let Fault::ChangeMembers { partition, voters, .. } = &entry.fault else { continue };
            let names: OrdSet<&String> = voters.iter().collect();
            let is_size = matches!(voters.len(), 1..=3 | 5 | 7);
            assert!(names.len() == voters.len() && is_size, "{voters:?}");
            self.sizes.insert(voters.len());
            moments.entry(entry.at_ms).or_default().insert(*partition);
            let before = now.insert(*partition, voters.clone()).unwrap();
            self.repeated += u32::from(before == *voters);
            self.disjoint += u32::from(before.iter().all(|node| !voters.contains(node)));
            self.with_transfer += u32::from(schedule.faults.iter().any(|other| {
                matches!(&other.fault, Fault::TransferLeader { partition: p, .. } if p == partition)
                    && other.at_ms.abs_diff(entry.at_ms) < 400
            }));
        }
        self.at_once += u32::from(moments.values().any(|partitions| partitions.len() > 1));
    }
}

#[test]
fn drawn_moves_cover_every_kind_of_membership_change() {
    for name in FAMILIES.into_iter().chain(["slog"]) {
        let subject = orthodrome_lab::find(name).unwrap();
        let mut orders = Orders::default();
        for seed in 0..300 {
            let scenario = subject.draw(seed, &SwarmOptions::of(name)).unwrap();
            orders.count(&scenario.schedule, &scenario.cluster);
        }
        let Orders { repeated, disjoint, at_once, with_transfer, .. } = orders;
        let least = [repeated, disjoint, at_once, with_transfer].into_iter().min();
        assert!(least >= Some(10), "{name}: {orders:?}");
        assert_eq!(orders.sizes, OrdSet::from([1, 2, 3, 5, 7]), "{name}: {orders:?}");
    }
}
