//! What messages and records of a protocol are held to as bytes. Each check is of one type.

#![allow(clippy::unwrap_used, dead_code, reason = "tests; not every one needs all of it")]

use std::any::type_name;
use std::cell::RefCell;
use std::fmt::Debug;
use std::path::Path;

use bytes::Bytes;
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::wire::{Schema, decode, encode};
use orthodrome_core::{Rng, Wire};
use orthodrome_protocols::registry::{Registered, Row, Visitor};

/// A check of the messages or of the records of a protocol.
pub trait Check {
    fn check<T: Wire + PartialEq + Debug>(&self, of: &'static str);
}

pub struct Each<'a, C>(pub &'a C);

impl<C: Check> Visitor for Each<'_, C> {
    type Out = ();

    fn visit<P: Registered>(self, _: &'static Row) {
        self.0.check::<P::Msg>(type_name::<P::Msg>());
        self.0.check::<P::Record>(type_name::<P::Record>());
    }
}

pub const SAMPLES: usize = 500;

pub struct ComesBack;

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

/// A frame around the bytes says how long they are; without it, bytes that are cut between two
/// fields are another message, but never the same.
pub struct IsNeverTakenForWhole;

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

pub struct IsRefusedOrRead;

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

/// Adds the fields of a type to a list.
pub struct AddTo<'a>(RefCell<&'a mut OrdSet<String>>);

impl Check for AddTo<'_> {
    fn check<T: Wire + PartialEq + Debug>(&self, _: &'static str) {
        self.0.borrow_mut().append(&mut Schema::of::<T>().lines());
    }
}

/// A field that is in the list at `path` keeps its number, name and type: nodes of two versions
/// talk to each other, and a node reads what an earlier version of it remembered. With
/// `UPDATE_GOLDENFILES=1` new fields are added to the list; whatever else differs has to be changed
/// by hand, with a new version of the handshake and of the data directory.
pub fn keep_fields(path: &Path, check: impl FnOnce(&AddTo<'_>)) {
    let mut lines = OrdSet::new();
    check(&AddTo(RefCell::new(&mut lines)));
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let known: OrdSet<String> = text.lines().map(str::to_owned).collect();
    let gone: Vec<_> = known.difference(&lines).collect();
    let list = path.display();
    assert!(
        gone.is_empty(),
        "{list}: earlier versions write these fields, and this one does not: {gone:#?}"
    );
    if std::env::var_os("UPDATE_GOLDENFILES").is_some() {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(path, text).unwrap();
        return;
    }
    let new: Vec<_> = lines.difference(&known).collect();
    assert!(new.is_empty(), "UPDATE_GOLDENFILES=1 adds these fields to {list}: {new:#?}");
}
