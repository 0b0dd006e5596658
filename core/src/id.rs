//! Ids, as newtypes with short displays: `r2`, `n7`, `p3`, `c4`, `c4.19`.
//!
//! Ids are counters, never random, so that a trace is the same in every run.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::wire::Wire;

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
}

impl TxnId {
    /// The first attempt of transaction `counter` of `client`.
    #[must_use]
    pub fn new(client: ClientId, counter: u64) -> Self {
        Self { client, counter, attempt: 0 }
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
