//! The rows of the middleware's variants. Servers do not run them like protocols: `proxy` and
//! `agent` do.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::machine::Protocol as _;
use orthodrome_eval::workload::Workload;
use orthodrome_geotp::contract::Kind;
use orthodrome_geotp::scalardb::{SCALARDB, SCALARDB_PLUS};
use orthodrome_geotp::simulated::{CHILLER, GeoTp, NEAR, O1, O2, O3, QURO, XA, XA_LOCAL};
use orthodrome_protocols::registry::{Guarantee, Row};
use orthodrome_sim::ScheduleError;
use orthodrome_sim::simulation::Simulated;

use crate::{Setup, configured};

/// The kinds of the middleware's data sources.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Sources {
    /// All MariaDB, or MySQL.
    #[default]
    MariaDb,
    /// The first, third and so on are PostgreSQL, the others MariaDB.
    Mixed,
    /// All PostgreSQL.
    Postgres,
}

impl Sources {
    fn kind(self, place: usize) -> Kind {
        match self {
            Self::MariaDb => Kind::MariaDb,
            Self::Mixed if place % 2 == 1 => Kind::MariaDb,
            Self::Mixed | Self::Postgres => Kind::Postgres,
        }
    }
}

pub(crate) fn simulation(
    setup: &Setup<'_>,
    cluster: Cluster,
    workload: Box<dyn Workload>,
) -> Result<Box<dyn Simulated>, ScheduleError> {
    let mut config = GeoTp::configure(&cluster, setup.name);
    for (place, kind) in config.middleware.sources.values_mut().enumerate() {
        *kind = setup.sources.kind(place);
    }
    configured::<GeoTp>(setup, cluster, workload, config)
}

/// For the machines in [`orthodrome_geotp::simulated`].
pub(crate) const ROWS: &[Row] = &[
    row(
        XA,
        "XA as in Apache ShardingSphere; GeoTP §II",
        "3: statements, prepare, commit; one source 2",
    ),
    Row {
        conditions: "only without failures: each branch commits independently",
        ..row(XA_LOCAL, "ShardingSphere's local mode; GeoTP §VII-A1", "2: statements, commit")
    },
    row(
        QURO,
        "QURO (VLDB 2016), as in GeoTP §VII-A1",
        "3: statements, prepare, commit; one source 2",
    ),
    row(
        CHILLER,
        "Chiller (SIGMOD 2020), as in GeoTP §VII-A1",
        "2: statements with prepare, commit; and 1 more for the near sources after the far",
    ),
    row(O1, "GeoTP (2025) §IV-A", "2: statements with prepare, commit; one source 1"),
    row(O2, "GeoTP (2025) §IV-A, §IV-B", "2: statements with prepare, commit; one source 1"),
    row(O3, "GeoTP (2025) §IV", "2: statements with prepare, commit; one source 1"),
    row(
        NEAR,
        "GeoTP with our mode for interactive transactions (ADR 42)",
        "2 after the reads: statements with prepare, commit; one source 1; the simulator reads at the source, not at a replica near by",
    ),
];

/// For those in [`orthodrome_geotp::scalardb`].
pub(crate) const SCALARDB_ROWS: &[Row] = &[
    scalardb(
        SCALARDB,
        "ScalarDB's consensus commit (PVLDB 16(12), 2023), as in GeoTP §VII-A1",
        "1 for each record read, then prepare, validation, state, commit; read-only 1 for each record and validation",
    ),
    scalardb(
        SCALARDB_PLUS,
        "the same with latency-aware and late scheduling; GeoTP §VII-A1",
        "5: reads, prepare, validation, state, commit; read-only 2",
    ),
];

const fn scalardb(name: &'static str, paper: &'static str, round_trips: &'static str) -> Row {
    Row {
        conditions: "records are changed by such middlewares only; not replicated: the data of a source that is down is unavailable",
        ..row(name, paper, round_trips)
    }
}

const fn row(name: &'static str, paper: &'static str, round_trips: &'static str) -> Row {
    Row {
        name,
        paper,
        guarantee: Guarantee::StrictSerializable,
        conditions: "every read locks, and sources keep what they lock; not replicated: the data of a source that is down is unavailable",
        model: "interactive with fixed sets (2FI) and general, procedures, read-only; predicates are not modelled",
        round_trips,
    }
}
