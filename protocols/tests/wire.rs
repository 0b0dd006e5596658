//! Messages and records of every protocol: there and back as bytes, damaged, and of two versions.

#![allow(clippy::unwrap_used, missing_docs, reason = "a test")]

#[path = "checks/wire.rs"]
mod checks;

use std::any::type_name;
use std::path::Path;

use checks::{Check, ComesBack, Each, IsNeverTakenForWhole, IsRefusedOrRead, SAMPLES, keep_fields};
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::store::Versions;
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{Op, Txn, Version};
use orthodrome_core::wire::{decode, encode};
use orthodrome_core::{
    ClientId, Cluster, Key, Limits, Message as _, NodeId, Protocol, Rng, Time, Timestamp, TxnId,
    Wire,
};
use orthodrome_protocols::Portion;
use orthodrome_protocols::carousel::{self, Carousel, Chunk};
use orthodrome_protocols::deterministic::Sequenced;
use orthodrome_protocols::ocean_vista::takeover::{self, Closed};
use orthodrome_protocols::ocean_vista::{Body, Functor, Msg, OceanVista, RECENT_BYTES};
use orthodrome_protocols::registry::{self, Registered, Row, Visitor};
use orthodrome_protocols::replication::Members;

/// Checks messages and records of every protocol; variants have the same.
fn of_every_protocol(check: &impl Check) {
    for name in names() {
        registry::with(name, Each(check)).unwrap();
    }
}

/// One variant of each protocol.
fn names() -> Vec<&'static str> {
    let mut types = OrdSet::new();
    let is_first = |row: &&Row| types.insert(registry::with(row.name, TypeName).unwrap());
    let names: Vec<_> = registry::rows().filter(is_first).map(|row| row.name).collect();
    assert!(names.len() > 5, "{names:?}");
    names
}

/// The name of a protocol's type.
struct TypeName;

impl Visitor for TypeName {
    type Out = &'static str;

    fn visit<P: Registered>(self, _: &'static Row) -> &'static str {
        type_name::<P>()
    }
}

#[test]
fn every_message_and_record_comes_back_as_it_was() {
    of_every_protocol(&ComesBack);
}

#[test]
fn a_message_cut_anywhere_is_never_taken_for_the_whole() {
    of_every_protocol(&IsNeverTakenForWhole);
}

#[test]
fn damaged_bytes_never_panic() {
    of_every_protocol(&IsRefusedOrRead);
}

/// What a decoder says to a value whose definition allows more than its type promises.
fn refusal<T: Wire>(value: &T) -> String {
    decode::<T>(&encode(value)).err().map(|error| error.to_string()).unwrap_or_default()
}

#[test]
fn values_that_break_a_promise_of_their_type_are_refused() {
    let mut rng = Rng::stream(6, "promises", 0);
    let keys = ["b", "a"].map(Key::from).to_vec();
    let txn = Txn { reads: keys.clone(), ..Wire::sample(&mut rng) };
    assert!(refusal(&txn).starts_with("Txn.reads holds"), "{}", refusal(&txn));
    let txn = Txn { reads: Vec::new(), writes: keys.clone(), ..txn };
    assert!(refusal(&txn).starts_with("Txn.writes holds"), "{}", refusal(&txn));
    let functor = Functor { writes: keys.clone(), ..Wire::sample(&mut rng) };
    assert!(refusal(&functor).starts_with("Functor.writes holds"), "{}", refusal(&functor));

    let voters = vec![NodeId(2), NodeId(1)];
    let members = Members { voters, ..Members::default() };
    assert!(refusal(&members).starts_with("Members.voters holds"), "{}", refusal(&members));

    let entry = Sequenced { homes: Vec::new(), ..Wire::sample(&mut rng) };
    assert!(refusal(&entry).starts_with("Sequenced.homes holds"), "{}", refusal(&entry));

    let version = |at| (Version { timestamp: Timestamp(at), ..Version::INITIAL }, None);
    let versions: Versions = [version(2), version(1)].into_iter().collect();
    let piece = Chunk::<carousel::State> {
        keys: vec![(Key::from("k"), versions)],
        ..Wire::sample(&mut rng)
    };
    assert!(refusal(&piece).starts_with("Chunk.keys holds"), "{}", refusal(&piece));

    let portion = Portion { sent_at: Time::ZERO, number: 1, of: 1 };
    assert!(refusal(&portion).starts_with("Portion holds"), "{}", refusal(&portion));
}

#[test]
fn samples_are_of_every_kind() {
    let mut rng = Rng::stream(4, "kinds", 0);
    let mut kinds = OrdSet::new();
    for _ in 0..SAMPLES {
        kinds.insert(<Carousel as Protocol>::Msg::sample(&mut rng).kind());
    }
    for kind in ["Commit", "AppendEntries", "SnapshotPiece", "PendingList", "FastPrepareResult"] {
        assert!(kinds.contains(kind), "no {kind} among {kinds:?}");
    }
}

/// Of what a coordinator of Ocean Vista has taken and is not visible yet, whoever takes over tells
/// in one message what survives, and a message has a largest size.
#[test]
fn what_survives_fits_into_a_message() {
    let topology = Topology::built_in("local3").unwrap();
    let cluster = Cluster::spread(topology, 1, 1, 3, 3).unwrap();
    let limit = OceanVista::configure(&cluster, "ocean-vista").in_flight_bytes_max;
    let key = Key::from("k");
    let shortest = Functor {
        txn: TxnId::new(ClientId(1), 1),
        reads: Vec::new(),
        writes: vec![key.clone()],
        body: Body::Ops(vec![Op::Delete(key)]),
        acknowledged_below: 0,
    };
    let count = limit.div_ceil(RECENT_BYTES + shortest.size()) as u64;
    let survivors = (0..count).map(|at| Timestamp(u64::MAX - at)).collect();
    let (above, upto) = (Timestamp::ZERO, Timestamp(u64::MAX));
    let closed = Closed { ballot: u64::MAX, above, upto, survivors };
    let mut rng = Rng::stream(5, "close", 0);
    let (partition, task) = (Wire::sample(&mut rng), Wire::sample(&mut rng));
    let msg = Msg::Takeover(Box::new(takeover::Message::Close { partition, task, closed }));
    let most = Limits::SERVER.message_bytes;
    assert!(msg.size() <= most, "{count} functors of {} bytes: {}", shortest.size(), msg.size());
}

/// The folder of a protocol has `wire.txt`, which lists every field of it that this version and
/// earlier ones write.
#[test]
fn fields_keep_their_numbers() {
    for name in names() {
        let module = registry::with(name, TypeName).unwrap().split("::").nth(1).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(module).join("wire.txt");
        keep_fields(&path, |check| registry::with(name, Each(check)).unwrap());
    }
}
