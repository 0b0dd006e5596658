//! A cluster that starts while clients submit at a fixed rate: what waited for leases comes all at
//! once.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_eval::workload::{self, Form};
use orthodrome_protocols::ocean_vista::NAME;
use orthodrome_sim::cpu::CpuModel;
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Schedule};

use super::support::EC2_3;

/// Transactions a second, of nine thousand that one core sustains.
const RATE: f64 = 7_000.0;

/// What clients submitted before servers had leases kept servers from extending them, and
/// everything had to be taken over: no transaction committed between 5 and 10 s. Now some 4 500 a
/// second do.
#[test]
fn ocean_vista_commits_if_it_starts_under_load() {
    let cluster = Cluster::spread(Topology::parse(EC2_3).unwrap(), 1, 1, 3, 3).unwrap();
    let options = workload::Options {
        form: Some(Form::Procedure),
        zipf: Some(0.5),
        ..workload::Options::default()
    };
    let load = workload::parse("ycsbt:4", &options).unwrap();
    let cpu = CpuModel { cores: 1, ..CpuModel::default() };
    let arrival = Arrival::Open { per_second: RATE, poisson: true };
    let options = Options {
        warmup: Duration::from_secs(5),
        duration: Duration::from_secs(10),
        load: LoadModel { arrival, ..LoadModel::default() },
        cpu: Some(cpu),
        ..Options::default()
    };
    let subject = orthodrome_lab::find(NAME).unwrap();
    let mut run = subject.simulation(cluster, load, &Schedule::default(), options, None).unwrap();
    let report = run.run().unwrap();
    let (committed, notes) = (report.result.committed_tps, report.notes);
    println!("{committed} a second; {notes:?}");
    assert!(committed > RATE / 2.0, "{committed} a second; {notes:?}");
}
