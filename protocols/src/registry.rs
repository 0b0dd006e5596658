//! Every protocol by name, with what it claims. One arm in [`with`] and one row in [`ROWS`] each.

use orthodrome_core::machine::Protocol;

use crate::carousel::{self, Carousel};
use crate::deterministic::{self, Deterministic};
use crate::natto::{self, Natto};
use crate::ocean_vista::{self, OceanVista};
use crate::tapir::{self, Tapir};
use crate::two_phase_locking::{self, Locking};

/// What a protocol promises about the order of transactions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Guarantee {
    /// Some serial order explains every result, and it agrees with real time.
    StrictSerializable,
    /// Some serial order explains every result.
    Serializable,
}

impl Guarantee {
    /// Its name on the command line and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::StrictSerializable => "strict-serializable",
            Self::Serializable => "serializable",
        }
    }
}

/// What is known of a protocol before it runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// The paper it comes from, and the sections it covers.
    pub paper: &'static str,
    /// What it promises; histories are held to it.
    pub guarantee: Guarantee,
    /// What the promise rests on.
    pub conditions: &'static str,
    /// Which transactions it runs natively.
    pub model: &'static str,
    /// Wide-area round trips of a transaction without conflicts or failures.
    pub round_trips: &'static str,
}

/// All protocols.
pub const ROWS: &[Row] = &[
    Row {
        name: carousel::BASIC,
        paper: "Carousel (SIGMOD 2018) §4.1, §4.3, §4.4.2",
        guarantee: Guarantee::StrictSerializable,
        conditions: "serializable always; strictly so while clocks keep their stated error bound",
        model: "interactive with fixed sets (2FI), procedures, read-only",
        round_trips: "at most 2; read-only 1",
    },
    Row {
        name: carousel::FAST,
        paper: "Carousel (SIGMOD 2018) §4.1–§4.4",
        guarantee: Guarantee::StrictSerializable,
        conditions: "serializable always; strictly so while clocks keep their stated error bound",
        model: "interactive with fixed sets (2FI), procedures, read-only",
        round_trips: "1 if every partition has a replica nearby; at most 2; read-only 1",
    },
    locking(two_phase_locking::BY_AGE, "Natto (SIGMOD 2022) §4: 2PL+2PC, wound-wait"),
    locking(two_phase_locking::PREEMPT, "Natto (SIGMOD 2022) §4: 2PL+2PC with priority preemption"),
    locking(
        two_phase_locking::PREEMPT_ON_WAIT,
        "Natto (SIGMOD 2022) §4: 2PL+2PC with preempt-on-wait",
    ),
    Row {
        name: tapir::NAME,
        paper: "TAPIR (SOSP 2015; TOCS 2018) §3, §5",
        guarantee: Guarantee::StrictSerializable,
        conditions: "serializable always; strictly so while clocks keep their stated error bound",
        model: "interactive with fixed sets (2FI), procedures, read-only",
        round_trips: "1 (fast path) or 2, and 1 more to read where no replica is near; read-only 1",
    },
    natto(natto::TS, "Natto (SIGMOD 2022) §2.2, §3.1, §3.2"),
    natto(natto::LECSF, "Natto (SIGMOD 2022) §3.2, §3.4: local early committed state forwarding"),
    natto(natto::PA, "Natto (SIGMOD 2022) §3.2, §3.3.1, §3.4 (local)"),
    natto(natto::CP, "Natto (SIGMOD 2022) §3.2, §3.3, §3.4 (local)"),
    natto(natto::RECSF, "Natto (SIGMOD 2022) §3"),
    Row {
        name: ocean_vista::NAME,
        paper: "Ocean Vista (VLDB 2019) §3, §4, §5",
        guarantee: Guarantee::StrictSerializable,
        conditions: "strictly serializable always",
        model: "procedures natively; interactive and general by reconnaissance; read-only",
        round_trips: "1 to store, and up to 1 more for watermarks; read-only at most 1",
    },
    deterministic(
        deterministic::CALVIN,
        "Calvin (SIGMOD 2012) §2, §3.1, §3.2; as Sloth (Hildred 2023) uses it",
        "2: to the leader of the log, and from there to a majority; read-only the same",
    ),
    deterministic(
        deterministic::SLOG,
        "SLOG (VLDB 2019) §3, one region orders what has several homes; as Sloth (Hildred 2023) uses it",
        "1 if there is one home and it is near, else up to 4: to the region that orders and to a majority, \
         then to the homes and to a majority; read-only the same",
    ),
    deterministic(
        deterministic::SLOG_CONSENSUS,
        "SLOG (VLDB 2019) §3, consensus on the order of what has several homes; Sloth §4.1",
        "1 if there is one home and it is near, else up to 4: to the leader of the order and to a majority, \
         then to the homes and to a majority; read-only the same",
    ),
    deterministic(
        deterministic::SLOTH,
        "Sloth (Hildred 2023) §4",
        "1 if all homes are near, else 2: to the furthest home, and from there to a majority; \
         read-only the same",
    ),
];

const fn deterministic(name: &'static str, paper: &'static str, round_trips: &'static str) -> Row {
    Row {
        name,
        paper,
        guarantee: Guarantee::StrictSerializable,
        conditions: "strictly serializable always",
        model: "procedures natively; interactive and general by reconnaissance; read-only",
        round_trips,
    }
}

const fn natto(name: &'static str, paper: &'static str) -> Row {
    Row {
        name,
        paper,
        guarantee: Guarantee::StrictSerializable,
        conditions: "serializable always; strictly so while clocks keep their stated error bound",
        model: "interactive with fixed sets (2FI), procedures, read-only",
        round_trips: "at most 2; read-only 1",
    }
}

const fn locking(name: &'static str, paper: &'static str) -> Row {
    Row {
        name,
        paper,
        guarantee: Guarantee::StrictSerializable,
        conditions: "serializable always; strictly so while clocks keep their stated error bound",
        model: "interactive with fixed sets (2FI) and general, procedures, read-only",
        round_trips: "at most 4; read-only 1",
    }
}

/// Something to do with a protocol that is known only by name.
pub trait Visitor {
    /// What comes of it.
    type Out;
    /// Does it.
    fn visit<P: Protocol>(self, row: &'static Row) -> Self::Out;
}

/// A name that no protocol has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no protocol {name:?}; there are: {known}")]
pub struct UnknownProtocol {
    name: String,
    known: String,
}

impl UnknownProtocol {
    /// `name` is none of `known`.
    #[must_use]
    pub fn new<'a>(name: &str, known: impl Iterator<Item = &'a Row>) -> Self {
        let known = known.map(|row| row.name).collect::<Vec<_>>().join(", ");
        Self { name: name.into(), known }
    }
}

/// The row of the protocol called `name`.
///
/// # Errors
/// If there is none; the error lists those there are.
pub fn find(name: &str) -> Result<&'static Row, UnknownProtocol> {
    let found = ROWS.iter().find(|row| row.name == name);
    found.ok_or_else(|| UnknownProtocol::new(name, ROWS.iter()))
}

/// True if the protocol called `name` can divide a region's copy of everything into shares
/// ([`Protocol::SHARES`]).
///
/// # Errors
/// If there is no such protocol.
pub fn has_shares(name: &str) -> Result<bool, UnknownProtocol> {
    struct HasShares;

    impl Visitor for HasShares {
        type Out = bool;
        fn visit<P: Protocol>(self, _: &'static Row) -> bool {
            P::SHARES
        }
    }

    with(name, HasShares)
}

/// Does something with the protocol called `name`.
///
/// # Errors
/// If there is no such protocol.
pub fn with<V: Visitor>(name: &str, visitor: V) -> Result<V::Out, UnknownProtocol> {
    let row = find(name)?;
    // One arm for each protocol; a row without an arm fails the test below.
    if Carousel::NAMES.contains(&name) {
        return Ok(visitor.visit::<Carousel>(row));
    }
    if Deterministic::NAMES.contains(&name) {
        return Ok(visitor.visit::<Deterministic>(row));
    }
    if Locking::NAMES.contains(&name) {
        return Ok(visitor.visit::<Locking>(row));
    }
    if Natto::NAMES.contains(&name) {
        return Ok(visitor.visit::<Natto>(row));
    }
    if OceanVista::NAMES.contains(&name) {
        return Ok(visitor.visit::<OceanVista>(row));
    }
    if Tapir::NAMES.contains(&name) {
        return Ok(visitor.visit::<Tapir>(row));
    }
    unreachable!("{name} has a row but no arm")
}

#[cfg(test)]
mod tests {
    use orthodrome_core::cluster::Cluster;
    use orthodrome_core::time::Duration;
    use orthodrome_core::topology::Topology;

    use super::*;

    struct Name;

    impl Visitor for Name {
        type Out = &'static str;
        fn visit<P: Protocol>(self, row: &'static Row) -> &'static str {
            let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
            let cluster = Cluster::spread(map, 1, 1, 3, 3).unwrap();
            P::name(&P::configure(&cluster, row.name))
        }
    }

    #[test]
    fn every_row_has_its_arm() {
        for row in ROWS {
            assert_eq!(with(row.name, Name), Ok(row.name));
        }
        let error = with("carousal", Name).unwrap_err().to_string();
        assert!(error.contains("carousal") && error.contains("carousel-basic"), "{error}");
    }
}
