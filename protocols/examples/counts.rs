//! Runs one hot path, named on the command line: `cargo xtask bench --counts` counts the
//! instructions that each of them takes.
//!
//! A path does the same work in every run: all randomness comes from fixed seeds. It prints what it
//! did, so that a change of the work is not mistaken for a change of its cost.

use std::error::Error;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::machine::{Message as _, Protocol};
use orthodrome_core::rng::Rng;
use orthodrome_core::store::{MemoryEngine, Store};
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{Key, Value, Version};
use orthodrome_core::wire::{Wire as _, decode, encode};
use orthodrome_eval::workload::{self, Form};
use orthodrome_protocols::carousel::{BASIC, Carousel, Msg};
use orthodrome_protocols::deterministic::{Deterministic, SLOTH};
use orthodrome_protocols::ocean_vista::OceanVista;
use orthodrome_sim::load::{Arrival, LoadModel};
use orthodrome_sim::{Options, Schedule, Simulation};

/// The allocator of the program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_default();
    let closed = |clients| Arrival::Closed { clients, think: Duration::ZERO };
    match path.as_str() {
        "carousel" => {
            let arrival = Arrival::Open { per_second: 1_000.0, poisson: true };
            simulate::<Carousel>(BASIC, ("azure5", 5), ("retwis", Form::Interactive), arrival)
        }
        "deterministic" => {
            let workload = ("ycsbt:4", Form::Procedure);
            simulate::<Deterministic>(SLOTH, ("local3", 3), workload, closed(100))
        }
        "ocean-vista" => {
            let workload = ("ycsbt:4", Form::Procedure);
            simulate::<OceanVista>("ocean-vista", ("local3", 3), workload, closed(100))
        }
        "wire" => messages(),
        "store" => versions(),
        other => Err(format!("no hot path is called {other:?}").into()),
    }
}

/// Two simulated seconds.
fn simulate<P: Protocol>(
    name: &str,
    (topology, partitions): (&str, u32),
    (workload, form): (&str, Form),
    arrival: Arrival,
) -> Result<(), Box<dyn Error>> {
    let topology = Topology::built_in(topology).ok_or("no such topology")?;
    let cluster = Cluster::spread(topology, 1, 1, partitions, 3)?;
    let config = P::configure(&cluster, name);
    let options = workload::Options { form: Some(form), ..workload::Options::default() };
    let workload = workload::parse(workload, &options)?;
    let options = Options {
        load: LoadModel { arrival, ..LoadModel::default() },
        warmup: Duration::ZERO,
        duration: Duration::from_secs(2),
        ..Options::default()
    };
    let schedule = Schedule::default();
    let mut simulation = Simulation::<P>::new(cluster, config, workload, &schedule, options)?;
    let report = simulation.run().map_err(|failure| format!("{failure}"))?;
    println!("{} events, {} commits", report.result.events, report.result.committed);
    Ok(())
}

/// Messages of every kind: their sizes, their bytes and back.
fn messages() -> Result<(), Box<dyn Error>> {
    let mut rng = Rng::stream(1, "counts", 0);
    let messages: Vec<Msg> = (0..2_000).map(|_| Msg::sample(&mut rng)).collect();
    let mut bytes = 0;
    for _ in 0..10 {
        for message in &messages {
            let encoded = encode(message);
            if encoded.len() != message.wire_size() || decode::<Msg>(&encoded)? != *message {
                return Err(format!("{message:?} is not what it was encoded from").into());
            }
            bytes += encoded.len();
        }
    }
    println!("{} messages, {bytes} bytes", messages.len() * 10);
    Ok(())
}

/// Versions that are stored, read, and merged by checkpoints.
fn versions() -> Result<(), Box<dyn Error>> {
    let engine = MemoryEngine::default();
    let mut store = Store::new(Box::new(engine.clone()));
    let mut rng = Rng::stream(1, "counts", 1);
    let keys: Vec<Key> = (0..20_000).map(|number| Key::from(format!("k{number:063}"))).collect();
    let (partition, value) = (PartitionId(1), Value::from(vec![b'v'; 64]));
    let mut found = 0;
    for number in 1..=200_000_u64 {
        let mut key = || {
            let at = usize::try_from(rng.below(keys.len() as u64)).unwrap_or_default();
            keys.get(at).cloned().unwrap_or_default()
        };
        if number % 4 == 0 {
            let writer = TxnId::new(ClientId(1), number);
            let version = Version { timestamp: Timestamp(number), writer };
            store.put(partition, key(), version, Some(value.clone()));
        } else {
            found += u64::from(store.read(partition, &key()).value.is_some());
        }
        if number % 50_000 == 0 {
            store.collect_below(partition, Timestamp(number / 2));
            engine.merge(&store.freeze());
            store.thaw();
        }
    }
    println!("{found} reads found a value");
    Ok(())
}
