//! Two versions of a message, and bytes that are cut or changed.

use crate::ordered::OrdMap;

use bytes::Bytes;

use super::*;

/// A message of an early version.
#[derive(Wire, Clone, PartialEq, Eq, Debug)]
enum Old {
    Read { key: Bytes, at_least: u64 },
    Stop,
}

/// The same message later: with new fields and a new variant.
#[derive(Wire, Clone, PartialEq, Eq, Debug)]
enum New {
    Read { key: Bytes, at_least: u64, limit: Option<u64>, nodes: Vec<u32>, flag: bool },
    Stop,
    Pause(u64),
}

fn pass<A: Wire, B: Wire>(value: &A) -> Result<B, WireError> {
    decode(&encode(value))
}

#[test]
fn a_later_version_reads_what_an_earlier_one_wrote() {
    let old = Old::Read { key: Bytes::from_static(b"k"), at_least: 7 };
    let new = New::Read {
        key: Bytes::from_static(b"k"),
        at_least: 7,
        limit: None,
        nodes: vec![],
        flag: false,
    };
    assert_eq!(pass(&old), Ok(new));
    assert_eq!(pass(&Old::Stop), Ok(New::Stop));
}

#[test]
fn an_earlier_version_skips_fields_of_a_later_one_and_refuses_its_variants() {
    let new = New::Read {
        key: Bytes::from_static(b"k"),
        at_least: 7,
        limit: Some(0),
        nodes: vec![0, 300],
        flag: true,
    };
    assert_eq!(pass(&new), Ok(Old::Read { key: Bytes::from_static(b"k"), at_least: 7 }));
    let error = WireError::Unknown { of: "Old", number: 3 };
    assert_eq!(pass::<_, Old>(&New::Pause(1)), Err(error));
}

#[test]
fn numbers_keep_their_value_and_take_no_more_than_they_need() {
    for value in [0, 1, 127, 128, 300, u64::from(u32::MAX), u64::MAX - 1, u64::MAX] {
        assert_eq!(pass(&(value, true)), Ok((value, true)));
        assert_eq!(encode(&(value, false)).len(), (value, false).size());
    }
    for value in [0, 1, -1, 63, -64, i64::MAX, i64::MIN] {
        assert_eq!(pass(&(value, 0_u8)), Ok((value, 0_u8)));
    }
    assert_eq!((-1_i64).size(), 1);
    assert!(pass::<_, (u8, u8)>(&(256_u64, 0_u8)).is_err(), "too wide");
}

#[test]
fn options_and_lists_within_each_other_keep_their_form() {
    type Deep = (Option<Option<u64>>, Vec<Vec<u32>>, Vec<Option<Bytes>>);
    let deep: Deep = (
        Some(None),
        vec![vec![], vec![0, 1], vec![]],
        vec![None, Some(Bytes::new()), Some(Bytes::from_static(b"v"))],
    );
    assert_eq!(pass(&deep), Ok(deep));
}

#[test]
fn bytes_that_are_cut_or_changed_are_refused_or_mean_something_else() {
    let mut rng = Rng::stream(1, "wire", 0);
    for _ in 0..2_000 {
        let whole = encode(&New::sample(&mut rng));
        let cut = whole.slice(..usize::try_from(rng.below(whole.len() as u64)).unwrap());
        let _ = decode::<New>(&cut);
        let mut changed = whole.to_vec();
        if let Some(byte) = rng.pick(&(0..changed.len()).collect::<Vec<_>>()).copied() {
            changed[byte] ^= 1 << rng.below(8);
        }
        let _ = decode::<New>(&changed.into());
    }
    let endless = Bytes::from_static(&[0x80; 11]);
    assert_eq!(decode::<Old>(&endless), Err(WireError::Malformed("a number without an end")));
}

/// A message whose second variant and second field have been removed.
#[derive(Wire, Clone, PartialEq, Eq, Debug)]
enum Later {
    Read {
        key: Bytes,
        #[wire(number = 3)]
        limit: Option<u64>,
    },
    #[wire(number = 3)]
    Pause(u64),
}

#[test]
fn fields_and_variants_after_a_removed_one_keep_their_numbers() {
    let key = Bytes::from_static(b"k");
    let new =
        New::Read { key: key.clone(), at_least: 7, limit: Some(3), nodes: vec![], flag: false };
    assert_eq!(pass(&new), Ok(Later::Read { key: key.clone(), limit: Some(3) }));
    assert_eq!(pass(&New::Pause(9)), Ok(Later::Pause(9)));
    let error = WireError::Unknown { of: "Later", number: 2 };
    assert_eq!(pass::<_, Later>(&New::Stop), Err(error));
}

#[test]
fn missing_fields_and_other_types_are_refused_by_name() {
    assert_eq!(decode::<Old>(&Bytes::new()), Err(WireError::Missing("Old")));
    /// Field 1 is a number here, and bytes in `Old`.
    #[derive(Wire)]
    enum Other {
        Read { key: u64 },
    }
    let error = pass::<_, Old>(&Other::Read { key: 5 }).unwrap_err();
    assert!(matches!(error, WireError::Shape { found: "a number", .. }), "{error}");
    // A wire type that protobuf once had: the start of a group.
    let group = Bytes::from_static(&[0x0b]);
    let error = WireError::Malformed("a field of an unknown wire type");
    assert_eq!(decode::<Old>(&group), Err(error));
}

/// A list that must ascend.
#[derive(Wire, Clone, PartialEq, Eq, Debug)]
struct Sorted {
    #[wire(ascending)]
    nodes: Vec<u32>,
}

/// The same list without that rule.
#[derive(Wire)]
struct Unsorted {
    nodes: Vec<u32>,
}

#[test]
fn lists_that_do_not_ascend_are_refused_with_the_name_of_the_field() {
    assert_eq!(pass(&Unsorted { nodes: vec![1, 2] }), Ok(Sorted { nodes: vec![1, 2] }));
    for nodes in [vec![2, 1], vec![1, 1]] {
        let error = pass::<_, Sorted>(&Unsorted { nodes }).unwrap_err();
        assert!(error.to_string().starts_with("Sorted.nodes holds"), "{error}");
    }
}

#[test]
fn one_key_twice_is_no_map() {
    let twice = vec![(1_u64, 2_u64), (1, 3)];
    assert!(pass::<_, OrdMap<u64, u64>>(&twice).is_err());
    assert_eq!(pass(&OrdMap::from([(1_u64, 2_u64)])), Ok(vec![(1_u64, 2_u64)]));
}

#[test]
fn the_schema_names_each_field_once() {
    let lines = Schema::of::<New>().lines();
    assert!(
        lines.iter().any(|line| line.ends_with("New::Read   3 limit optional u64")),
        "{lines:?}"
    );
    assert_eq!(lines.len(), 3 + 5);
}
