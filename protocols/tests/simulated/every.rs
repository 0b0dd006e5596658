//! Every protocol of the registry, also one that has no tests of its own here yet.

use std::thread;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_eval::workload;
use orthodrome_protocols::registry::{self, Registered, Row, Visitor};
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Schedule};

use super::support::{catch, hold_every_promise};

#[test]
fn a_few_seeds_of_every_protocol_pass() {
    for row in registry::rows() {
        hold_every_promise(row.name, 700_000..700_004, 4);
    }
}

struct Catch;

impl Visitor for Catch {
    type Out = ();

    fn visit<P: Registered>(self, row: &'static Row) {
        for (_, mutation, within) in P::CAUGHT_WITHIN.iter().filter(|known| known.0 == row.name) {
            catch(row.name, mutation, None, *within);
        }
    }
}

#[test]
fn mutations_are_caught_within_as_many_seeds_as_their_protocols_say() {
    thread::scope(|scope| {
        for row in registry::rows() {
            scope.spawn(move || registry::with(row.name, Catch).unwrap());
        }
    });
}

/// A clock is half a second ahead, so it tells commits whose timestamps have not passed on the others.
/// Or the clock of who reads at the end is behind. The final audit must not take these writes for lost.
#[test]
fn a_write_that_a_fast_clock_told_too_early_is_not_lost() {
    for row in registry::rows() {
        for (seed, (region, by_ms)) in (1..).zip([("B", 500), ("B", 500), ("A", -500), ("A", -500)])
        {
            let schedule = format!(
                "[[faults]]\nat_ms = 2700\n\
                 fault.clock-step = {{ nodes = [\"{region}\"], by_ms = {by_ms} }}"
            );
            let schedule = Schedule::parse(&schedule).unwrap();
            let cluster = Cluster::spread(Topology::built_in("local5").unwrap(), 1, 1, 5, 3);
            let keys = workload::Options { keys: Some(30), ..workload::Options::default() };
            let workload = workload::parse("list-append", &keys).unwrap();
            let options = Options {
                seed,
                load: LoadModel {
                    arrival: Arrival::Open { per_second: 100.0, poisson: true },
                    ..LoadModel::default()
                },
                warmup: Duration::from_secs(1),
                duration: Duration::from_secs(3),
                check_outcomes: true,
                ..Options::default()
            };
            let subject = orthodrome_lab::find(row.name).unwrap();
            let run = subject.simulation(cluster.unwrap(), workload, &schedule, options, None);
            if let Err(failure) = run.unwrap().run() {
                panic!("{}, seed {seed}: {failure}", row.name);
            }
        }
    }
}
