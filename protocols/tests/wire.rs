//! Messages and records of every protocol: there and back as bytes, damaged, and of two versions.

#![allow(clippy::unwrap_used, missing_docs, reason = "a test")]

use std::any::type_name;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::path::Path;

use bytes::Bytes;
use orthodrome_core::store::Versions;
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{Op, Txn, Version};
use orthodrome_core::wire::{Schema, decode, encode};
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

/// A check of the messages or of the records of a protocol.
trait Check {
    fn check<T: Wire + PartialEq + Debug>(&self, of: &'static str);
}

struct Each<'a, C>(&'a C);

impl<C: Check> Visitor for Each<'_, C> {
    type Out = ();

    fn visit<P: Registered>(self, _: &'static Row) {
        self.0.check::<P::Msg>(type_name::<P::Msg>());
        self.0.check::<P::Record>(type_name::<P::Record>());
    }
}

/// Checks messages and records of every protocol; variants have the same.
fn of_every_protocol(check: &impl Check) {
    let mut done = BTreeSet::new();
    for row in registry::rows() {
        if done.insert(registry::with(row.name, TypeName).unwrap()) {
            registry::with(row.name, Each(check)).unwrap();
        }
    }
    assert!(done.len() > 5, "{done:?}");
}

/// The name of a protocol's type.
struct TypeName;

impl Visitor for TypeName {
    type Out = &'static str;

    fn visit<P: Registered>(self, _: &'static Row) -> &'static str {
        type_name::<P>()
    }
}

const SAMPLES: usize = 500;

struct ComesBack;

impl Check for ComesBack {
    fn check<T: Wire + PartialEq + Debug>(&self, of: &'static str) {
        let mut rng = Rng::stream(1, of, 0);
        for _ in 0..SAMPLES {
            let value = T::sample(&mut rng);
            let bytes = encode(&value);
            assert_eq!(bytes.len(), value.size(), "{of}: {value:?}");
            assert_eq!(decode::<T>(&bytes).as_ref(), Ok(&value), "{of}");
        }
    }
}

#[test]
fn every_message_and_record_comes_back_as_it_was() {
    of_every_protocol(&ComesBack);
}

/// A frame around the bytes says how long they are; without it, bytes that are cut between two fields
/// are another message, but never the same.
struct IsNeverTakenForWhole;

impl Check for IsNeverTakenForWhole {
    fn check<T: Wire + PartialEq + Debug>(&self, of: &'static str) {
        let mut rng = Rng::stream(2, of, 0);
        for _ in 0..SAMPLES / 10 {
            let value = T::sample(&mut rng);
            let bytes = encode(&value);
            for _ in 0..100 {
                let cut = usize::try_from(rng.below(bytes.len() as u64)).unwrap();
                assert_ne!(decode::<T>(&bytes.slice(..cut)).as_ref(), Ok(&value), "{of} at {cut}");
            }
        }
    }
}

#[test]
fn a_message_cut_anywhere_is_never_taken_for_the_whole() {
    of_every_protocol(&IsNeverTakenForWhole);
}

struct IsRefusedOrRead;

impl Check for IsRefusedOrRead {
    fn check<T: Wire + PartialEq + Debug>(&self, of: &'static str) {
        let mut rng = Rng::stream(3, of, 0);
        for _ in 0..SAMPLES {
            let mut bytes = encode(&T::sample(&mut rng)).to_vec();
            for _ in 0..1 + rng.below(4) {
                let at = usize::try_from(rng.below(bytes.len() as u64)).unwrap();
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = rng.next_u64().to_le_bytes()[0];
                }
            }
            let _ = decode::<T>(&bytes.into());
            let noise: Vec<u8> =
                (0..rng.below(200)).map(|_| rng.next_u64().to_le_bytes()[0]).collect();
            let _ = decode::<T>(&noise.into());
        }
        // A length that is longer than any memory.
        let endless =
            Bytes::from_static(&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]);
        assert!(decode::<T>(&endless).is_err(), "{of}");
    }
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
    let keys = ["b", "a"].map(|key| Key(Bytes::from_static(key.as_bytes()))).to_vec();
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
        keys: vec![(Key(Bytes::from_static(b"k")), versions)],
        ..Wire::sample(&mut rng)
    };
    assert!(refusal(&piece).starts_with("Chunk.keys holds"), "{}", refusal(&piece));

    let portion = Portion { sent_at: Time::ZERO, number: 1, of: 1 };
    assert!(refusal(&portion).starts_with("Portion holds"), "{}", refusal(&portion));
}

#[test]
fn samples_are_of_every_kind() {
    let mut rng = Rng::stream(4, "kinds", 0);
    let mut kinds = BTreeSet::new();
    for _ in 0..SAMPLES {
        kinds.insert(<Carousel as Protocol>::Msg::sample(&mut rng).kind());
    }
    for kind in ["Commit", "AppendEntries", "SnapshotPiece", "PendingList", "FastPrepareResult"] {
        assert!(kinds.contains(kind), "no {kind} among {kinds:?}");
    }
}

/// Of what a coordinator of Ocean Vista has taken and is not visible yet, whoever takes over tells in one
/// message what survives, and a message has a largest size.
#[test]
fn what_survives_fits_into_a_message() {
    let topology = Topology::built_in("local3").unwrap();
    let cluster = Cluster::spread(topology, 1, 1, 3, 3).unwrap();
    let limit = OceanVista::configure(&cluster, "ocean-vista").in_flight_bytes_max;
    let key = Key(Bytes::from_static(b"k"));
    let shortest = Functor {
        txn: TxnId { client: ClientId(1), counter: 1, attempt: 0 },
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

/// Adds the fields of a type to a list.
struct AddTo<'a>(RefCell<&'a mut BTreeSet<String>>);

impl Check for AddTo<'_> {
    fn check<T: Wire + PartialEq + Debug>(&self, _: &'static str) {
        self.0.borrow_mut().append(&mut Schema::of::<T>().lines());
    }
}

/// `wire.txt` lists every field that this version and earlier ones write. A field that is in the list
/// keeps its number, name and type: nodes of two versions talk to each other, and a node reads what an
/// earlier version of it remembered. With `UPDATE_GOLDENFILES=1` new fields are added to the list;
/// whatever else differs has to be changed by hand, with a new version of the handshake and of the
/// data directory.
#[test]
fn fields_keep_their_numbers() {
    let mut lines = BTreeSet::new();
    of_every_protocol(&AddTo(RefCell::new(&mut lines)));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("wire.txt");
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let known: BTreeSet<String> = text.lines().map(str::to_owned).collect();
    let gone: Vec<_> = known.difference(&lines).collect();
    assert!(
        gone.is_empty(),
        "earlier versions write these fields, and this one does not: {gone:#?}"
    );
    if std::env::var_os("UPDATE_GOLDENFILES").is_some() {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&path, text).unwrap();
        return;
    }
    let new: Vec<_> = lines.difference(&known).collect();
    assert!(new.is_empty(), "UPDATE_GOLDENFILES=1 adds these fields to wire.txt: {new:#?}");
}
