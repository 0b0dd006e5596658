//! Every protocol in the simulator, by name. A simulation is generic over its protocol, so every
//! program that runs one compiles all of it. This crate does that once, for the program and for
//! tests (ADR 13).

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
    /// The protocol's row in the registry.
    pub row: &'static Row,
    /// True if it runs general transactions ([`Protocol::GENERAL`]).
    pub is_general: bool,
    /// True if partitions have replicas ([`Protocol::REPLICATED`]).
    pub is_replicated: bool,
    /// True if servers may hold shares of a region's copy ([`Protocol::SHARES`]).
    pub has_shares: bool,
    /// True if its servers list names, so that workloads with scans run.
    pub has_scans: bool,
    /// True if its servers are databases behind a middleware.
    pub has_sources: bool,
    /// The kinds of these databases.
    pub sources: Sources,
    /// The names of its mutations.
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

/// The parameters of a simulation besides the cluster and the workload.
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

/// The rows of all protocols that can be simulated: those that servers run, and the middleware's.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    registry::rows().chain(middleware::ROWS).chain(middleware::SCALARDB_ROWS)
}

/// Baselines that keep their guarantee only while nothing fails.
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
        has_scans: P::SCANS,
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
    /// The protocol's claimed guarantee, as the checker names it.
    #[must_use]
    pub fn model(&self) -> Model {
        match self.row.guarantee {
            Guarantee::StrictSerializable => Model::StrictSerializable,
            Guarantee::Serializable => Model::Serializable,
        }
    }

    /// The guarantee against which its histories are checked under `schedule`, see
    /// [`promise::model_under`].
    #[must_use]
    pub fn model_under(&self, schedule: &Schedule) -> Model {
        (self.model_under)(self.model(), schedule)
    }

    /// A simulation with the default settings for the cluster, about to begin; with a mutation, if
    /// `mutation` names one of [`Subject::mutations`].
    ///
    /// # Errors
    /// If the schedule does not fit the cluster.
    ///
    /// # Panics
    /// If the protocol has no such mutation.
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

    /// The draws of `seed` for this protocol.
    ///
    /// # Errors
    /// As [`Scenario::draw`].
    pub fn draw(&self, seed: u64, options: &SwarmOptions) -> Result<Scenario, SwarmError> {
        (self.draw)(seed, options)
    }

    /// Runs `seed` for this protocol, and shrinks it if it fails.
    ///
    /// # Errors
    /// As [`run_seed`].
    pub fn run_seed(&self, seed: u64, options: &SwarmOptions) -> Result<SeedResult, SwarmError> {
        (self.run_seed)(seed, options)
    }

    /// Runs one scenario, and sends its trace and its history to the given sinks.
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
