//! Ids, as newtypes with short displays: `r2`, `n7`, `p3`, `c4`, `c4.19`.
//!
//! Ids are counters, never random, so that a trace is the same in every run.

use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::str::FromStr;

use bytes::{BufMut as _, Bytes};
use serde::{Deserialize, Serialize};

use crate::Rng;
use crate::wire::{Out, Raw, Schema, Shape, Wire, WireError};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize, Wire)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                text.strip_prefix($prefix)
                    .and_then(|digits| digits.parse().ok())
                    .map($name)
                    .ok_or_else(|| ParseIdError { expected: concat!($prefix, "<number>"), found: text.into() })
            }
        }
    };
}

id!(
    /// A region: its index in the topology's list of regions.
    RegionId(u16), "r");
id!(
    /// A node: a server, or a gateway, which runs the client side of a protocol. Both share one
    /// number space; [`crate::Cluster`] knows which is which.
    NodeId(u32), "n");
id!(
    /// A partition of a keyspace, and its replication group.
    PartitionId(u32), "p");
id!(
    /// A share of the values in a region's copy, for protocols that keep a complete copy in each
    /// region.
    ShareId(u32), "s");
id!(
    /// One *incarnation* of a client. A client that restarts gets a new id, so that (client,
    /// counter) names one transaction for ever (`protocol-pitfalls` R6).
    ClientId(u64), "c");
id!(
    /// The number of a write to durable storage. The host numbers writes from 1 in the order of
    /// issue. Durability is a prefix: when ticket `t` is durable, so is every ticket before it.
    Ticket(u64), "t");

impl ClientId {
    /// A gateway numbers its clients with so many bits; those above are its own id.
    pub const NUMBER_BITS: u32 = 40;

    /// The client of that number, from 0, that a gateway registers.
    #[must_use]
    pub fn registered(gateway: NodeId, number: u64) -> Self {
        Self((u64::from(gateway.0) << Self::NUMBER_BITS) | number)
    }

    /// The number under which `gateway` registered this client; none if another gateway did.
    #[must_use]
    pub fn number_at(self, gateway: NodeId) -> Option<u64> {
        let is_here = self.0 >> Self::NUMBER_BITS == u64::from(gateway.0);
        is_here.then_some(self.0 & ((1 << Self::NUMBER_BITS) - 1))
    }
}

/// A digest of what a transaction does: its keys, its operations, and what its client decided. Two
/// transactions with one name and two contents are two transactions to every protocol (ADR 46).
///
/// [`Content::NONE`] stands for a client that is part of this process, and uses no name twice. The
/// simulator's clients are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Content([u8; 16]);

impl Content {
    /// No digest; the least one.
    pub const NONE: Self = Self([0; 16]);

    /// The digest of these bytes: half of SHA-256, in which nobody finds two texts with one digest.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        use sha2::Digest as _;
        let digest = sha2::Sha256::digest(bytes);
        let mut content = Self::NONE;
        for (to, from) in content.0.iter_mut().zip(digest) {
            *to = from;
        }
        content
    }

    /// The digest of this content and of more bytes.
    #[must_use]
    pub fn and(self, bytes: &[u8]) -> Self {
        Self::of(&[&self.0[..], bytes].concat())
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl Wire for Content {
    const SHAPE: Shape = Shape::Bytes;

    fn size(&self) -> usize {
        if self.is_absent() { 0 } else { self.0.len() }
    }

    fn put(&self, out: &mut Out) {
        if !self.is_absent() {
            out.put_slice(&self.0);
        }
    }

    fn take(raw: Raw<'_>) -> Result<Self, WireError> {
        let bytes = Bytes::take(raw)?;
        if bytes.is_empty() {
            return Ok(Self::NONE);
        }
        <[u8; 16]>::try_from(&bytes[..]).map(Self).map_err(|_| WireError::Value {
            field: "Content",
            found: format!("{} bytes", bytes.len()),
            wanted: "a digest of 16 bytes",
        })
    }

    fn sample(rng: &mut Rng) -> Self {
        if rng.below(2) == 0 { Self::NONE } else { Self::of(&rng.next_u64().to_le_bytes()) }
    }

    fn schema(_: &mut Schema) -> String {
        "bytes".to_owned()
    }

    fn is_absent(&self) -> bool {
        *self == Self::NONE
    }

    fn absent() -> Option<Self> {
        Some(Self::NONE)
    }
}

/// One attempt at one transaction: `c4.19`, and `c4.19#2` for its third attempt.
///
/// The attempt is part of the name. So every message that names a transaction also names the
/// attempt (`protocol-pitfalls` R3), and no state of one attempt can be mistaken for another's.
/// Ordered by client, then counter, then attempt.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Wire)]
pub struct TxnId {
    /// The client incarnation that submitted the transaction.
    pub client: ClientId,
    /// The client's counter of its transactions, from 1.
    pub counter: u64,
    /// 0 for the first attempt; a retry after a known abort adds one.
    pub attempt: u32,
    /// What the attempt does. The gateway computes it, so a client cannot choose it.
    pub content: Content,
}

impl TxnId {
    /// The first attempt of transaction `counter` of `client`.
    #[must_use]
    pub const fn new(client: ClientId, counter: u64) -> Self {
        Self { client, counter, attempt: 0, content: Content::NONE }
    }

    /// The name that its client uses: without the content.
    #[must_use]
    pub fn name(self) -> Self {
        Self { content: Content::NONE, ..self }
    }

    /// All earlier attempts at the same transaction.
    #[must_use]
    pub fn earlier(self) -> Range<Self> {
        Self { attempt: 0, ..self.name() }..self.name()
    }

    /// All later attempts at the same transaction.
    #[must_use]
    pub fn later(self) -> RangeInclusive<Self> {
        self.retry().name()..=Self { attempt: u32::MAX, content: Content([0xff; 16]), ..self }
    }

    /// The next attempt at the same transaction.
    #[must_use]
    pub fn retry(self) -> Self {
        Self { attempt: self.attempt.saturating_add(1), ..self }
    }

    /// True if `self` and `other` are attempts at the same transaction.
    #[must_use]
    pub fn is_same_txn(self, other: Self) -> bool {
        self.client == other.client && self.counter == other.counter
    }
}

impl fmt::Display for TxnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.client, self.counter)?;
        if self.attempt > 0 {
            write!(f, "#{}", self.attempt)?;
        }
        Ok(())
    }
}

impl fmt::Debug for TxnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for TxnId {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        let error =
            || ParseIdError { expected: "c<client>.<counter>[#<attempt>]", found: text.into() };
        let (client, rest) = text.split_once('.').ok_or_else(error)?;
        let (counter, attempt) = rest.split_once('#').unwrap_or((rest, "0"));
        Ok(Self {
            client: client.parse().map_err(|_| error())?,
            counter: counter.parse().map_err(|_| error())?,
            attempt: attempt.parse().map_err(|_| error())?,
            content: Content::NONE,
        })
    }
}

/// The string is not an id of the expected type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{found:?} is not a name of the form {expected}")]
pub struct ParseIdError {
    expected: &'static str,
    found: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_digests() {
        // The first half of the digest of FIPS 180-4's example.
        assert_eq!(format!("{:?}", Content::of(b"abc")), "ba7816bf8f01cfea414140de5dae2223");
        assert_ne!(Content::of(b"abc"), Content::NONE);
        assert_ne!(Content::of(b"abc").and(b"d"), Content::of(b"abcd"));
    }

    #[test]
    fn attempts_are_before_and_after_each_other_whatever_their_contents() {
        let attempt = |attempt, text: &str| TxnId {
            attempt,
            content: Content::of(text.as_bytes()),
            ..TxnId::new(ClientId(4), 19)
        };
        for mine in ["a", "b", "c"] {
            for others in ["a", "b", "c"] {
                let second = attempt(1, mine);
                assert!(second.earlier().contains(&attempt(0, others)));
                assert!(!second.earlier().contains(&attempt(1, others)));
                assert!(second.later().contains(&attempt(2, others)));
                assert!(!second.later().contains(&attempt(1, others)));
            }
        }
        assert!(!attempt(0, "a").earlier().contains(&attempt(0, "b")));
    }

    #[test]
    fn a_client_belongs_to_the_gateway_that_registered_it() {
        let client = ClientId::registered(NodeId(3), 17);
        assert_eq!(client.number_at(NodeId(3)), Some(17));
        assert_eq!(client.number_at(NodeId(4)), None);
    }

    #[test]
    fn names_round_trip_through_text() {
        for id in ["c4.19", "c4.19#2", "c0.0", "c18446744073709551615.1"] {
            assert_eq!(id.parse::<TxnId>().unwrap().to_string(), id);
        }
        assert_eq!("n7".parse::<NodeId>().unwrap(), NodeId(7));
        for bad in ["", "4.19", "c4", "c4.x", "c4.1#", "n4.1"] {
            assert!(bad.parse::<TxnId>().is_err(), "{bad:?} should not parse");
        }
    }
}
