//! Every protocol in the simulator, by name. A simulation is generic in its protocol, so whoever runs one
//! compiles all of it; this crate does that once, for the program and for tests alike (ADR 13).

mod middleware;

pub use middleware::Sources;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::machine::{NO_SESSIONS, Protocol};
use orthodrome_eval::checker::Model;
use orthodrome_eval::workload::Workload;
use orthodrome_geotp::scalardb::ScalarDb;
use orthodrome_geotp::simulated::GeoTp;
use orthodrome_protocols::registry::{self, Guarantee, Registered, Row, UnknownProtocol, Visitor};
use orthodrome_sim::load::HistorySink;
use orthodrome_sim::promise;
use orthodrome_sim::simulation::{Simulated, TraceSink};
use orthodrome_sim::swarm::{
    Scenario, ScenarioResult, SeedResult, SwarmError, SwarmOptions, record_scenario, run_seed,
};
use orthodrome_sim::{Options, Schedule, ScheduleError, Simulation};

/// A protocol in the simulator.
#[derive(Clone, Copy)]
pub struct Subject {
    /// What is known of it.
    pub row: &'static Row,
    /// It runs general transactions ([`Protocol::GENERAL`]).
    pub is_general: bool,
    /// Partitions have replicas ([`Protocol::REPLICATED`]).
    pub is_replicated: bool,
    /// Servers may hold shares of a region's copy ([`Protocol::SHARES`]).
    pub has_shares: bool,
    /// Servers are databases of some kind, behind a middleware.
    pub has_sources: bool,
    /// Which, if they are.
    pub sources: Sources,
    /// Its unsafe variants, by name.
    pub mutations: &'static [&'static str],
    simulation: Simulate,
    model_under: fn(Model, &Schedule) -> Model,
    draw: fn(u64, &SwarmOptions) -> Result<Scenario, SwarmError>,
    run_seed: fn(u64, &SwarmOptions) -> Result<SeedResult, SwarmError>,
    record: Record,
}

type Simulate =
    fn(&Setup<'_>, Cluster, Box<dyn Workload>) -> Result<Box<dyn Simulated>, ScheduleError>;
type Record = fn(
    &Scenario,
    &SwarmOptions,
    Option<TraceSink>,
    Option<HistorySink>,
) -> Result<ScenarioResult, SwarmError>;

/// What a simulation is of, besides a cluster and a workload.
struct Setup<'a> {
    name: &'static str,
    schedule: &'a Schedule,
    options: Options,
    mutation: Option<&'a str>,
    sources: Sources,
}

/// The protocol called `name`.
///
/// # Errors
/// If there is none.
pub fn find(name: &str) -> Result<Subject, UnknownProtocol> {
    if let Some(row) = middleware::ROWS.iter().find(|row| row.name == name) {
        let subject = subject::<GeoTp>(row);
        return Ok(Subject { has_sources: true, simulation: middleware::simulation, ..subject });
    }
    if let Some(row) = middleware::SCALARDB_ROWS.iter().find(|row| row.name == name) {
        return Ok(subject::<ScalarDb>(row));
    }
    registry::with(name, Find).map_err(|_| UnknownProtocol::new(name, rows()))
}

/// What is known of every protocol that can be simulated: those that servers run, and the middleware's.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    registry::rows().chain(middleware::ROWS).chain(middleware::SCALARDB_ROWS)
}

/// Those that keep their promise only while nothing fails: baselines.
pub const NOT_ATOMIC: &[&str] = &[orthodrome_geotp::simulated::XA_LOCAL];

struct Find;

impl Visitor for Find {
    type Out = Subject;

    fn visit<P: Registered>(self, row: &'static Row) -> Subject {
        subject::<P>(row)
    }
}

fn subject<P: Protocol>(row: &'static Row) -> Subject {
    Subject {
        row,
        is_general: P::GENERAL,
        is_replicated: P::REPLICATED,
        has_shares: P::SHARES,
        has_sources: false,
        sources: Sources::default(),
        mutations: P::mutations(row.name),
        simulation: simulation::<P>,
        model_under: promise::model_under::<P>,
        draw: Scenario::draw::<P>,
        run_seed: run_seed::<P>,
        record: record_scenario::<P>,
    }
}

fn simulation<P: Protocol>(
    setup: &Setup<'_>,
    cluster: Cluster,
    workload: Box<dyn Workload>,
) -> Result<Box<dyn Simulated>, ScheduleError> {
    let config = P::configure(&cluster, setup.name);
    configured::<P>(setup, cluster, workload, config)
}

fn configured<P: Protocol>(
    setup: &Setup<'_>,
    cluster: Cluster,
    workload: Box<dyn Workload>,
    mut config: P::Config,
) -> Result<Box<dyn Simulated>, ScheduleError> {
    if let Some(mutation) = setup.mutation {
        P::enable_mutation(&mut config, mutation);
    }
    let mut options = setup.options.clone();
    options.load.no_sessions = setup.mutation == Some(NO_SESSIONS);
    Ok(Box::new(Simulation::<P>::new(cluster, config, workload, setup.schedule, options)?))
}

impl Subject {
    /// What the protocol claims, as the checker names it.
    #[must_use]
    pub fn model(&self) -> Model {
        match self.row.guarantee {
            Guarantee::StrictSerializable => Model::StrictSerializable,
            Guarantee::Serializable => Model::Serializable,
        }
    }

    /// What its histories are held to under `schedule`, see [`promise::model_under`].
    #[must_use]
    pub fn model_under(&self, schedule: &Schedule) -> Model {
        (self.model_under)(self.model(), schedule)
    }

    /// A simulation with the settings that suit the cluster, about to begin; of an unsafe variant, if `mutation`
    /// names one of [`Subject::mutations`].
    ///
    /// # Errors
    /// What in the schedule does not fit the cluster.
    ///
    /// # Panics
    /// If the protocol has no such variant.
    pub fn simulation(
        &self,
        cluster: Cluster,
        workload: Box<dyn Workload>,
        schedule: &Schedule,
        options: Options,
        mutation: Option<&str>,
    ) -> Result<Box<dyn Simulated>, ScheduleError> {
        let setup =
            Setup { name: self.row.name, schedule, options, mutation, sources: self.sources };
        (self.simulation)(&setup, cluster, workload)
    }

    /// What `seed` draws for this protocol.
    ///
    /// # Errors
    /// As [`Scenario::draw`].
    pub fn draw(&self, seed: u64, options: &SwarmOptions) -> Result<Scenario, SwarmError> {
        (self.draw)(seed, options)
    }

    /// Runs what `seed` draws for this protocol, and shrinks it if it fails.
    ///
    /// # Errors
    /// As [`run_seed`].
    pub fn run_seed(&self, seed: u64, options: &SwarmOptions) -> Result<SeedResult, SwarmError> {
        (self.run_seed)(seed, options)
    }

    /// Runs one scenario, and sends its trace and its history where they are wanted.
    ///
    /// # Errors
    /// As [`record_scenario`].
    pub fn record(
        &self,
        scenario: &Scenario,
        options: &SwarmOptions,
        trace: Option<TraceSink>,
        history: Option<HistorySink>,
    ) -> Result<ScenarioResult, SwarmError> {
        (self.record)(scenario, options, trace, history)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

    use super::*;

    #[test]
    fn clock_faults_lower_the_promise_of_protocols_whose_conditions_name_clocks() {
        let faults = "[[faults]]\nat_ms = 1\nfault.clock-step = { nodes = [\"*\"], by_ms = 9 }\n";
        let clock_step = Schedule::parse(faults).unwrap();
        for row in rows() {
            let subject = find(row.name).unwrap();
            let needs_clocks = row.conditions.contains("clocks");
            let expected = if needs_clocks { Model::Serializable } else { subject.model() };
            assert_eq!(subject.model_under(&clock_step), expected, "{}", row.name);
            assert_eq!(subject.model_under(&Schedule::default()), subject.model(), "{}", row.name);
        }
    }
}
