//! The search: many short runs, then fewer longer ones, then several seeds of the best pairs.

use std::time::Duration;

use anyhow::{Context as _, bail};
use orthodrome_core::id::RegionId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_eval::metrics::{RunResult, Summary};
use orthodrome_sim::Schedule;
use serde::Serialize;

use super::objective::Objective;
use super::placement::{Candidate, Regions, Wish};
use crate::common::{Placement, WorkloadArgs};
use crate::protocols;
use crate::sim::{self, Course};
use crate::workers::Pool;

/// Length of a run of the first round.
const FIRST: Duration = Duration::from_secs(15);
/// Length of a run of the second round.
const SECOND: Duration = Duration::from_secs(30);
/// Number of pairs that the second round runs, and how many of them may have one protocol.
const SECOND_MAX: (usize, usize) = (12, 4);
/// The same for the third round.
const THIRD_MAX: (usize, usize) = (4, 2);
/// Number of these pairs whose partitions are moved one by one.
const MOVED_MAX: usize = 2;
/// Maximum number of partitions that are moved.
const MOVED_PARTITIONS_MAX: usize = 8;
/// The relative gain for which a move is kept: a moved placement is harder to explain.
const GAIN: f64 = 0.02;
/// Relative difference up to which finalists count as equal.
const TIE: f64 = 0.01;

/// A protocol at a placement.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pair {
    /// The protocol.
    pub protocol: &'static str,
    /// The placement.
    pub candidate: Candidate,
}

/// The results of one run of a pair.
#[derive(Clone, Serialize, Debug)]
pub struct Run {
    /// The figures.
    #[serde(flatten)]
    pub result: RunResult,
    /// Latencies by the client's region.
    pub regions: OrdMap<String, Summary>,
    /// Bytes that crossed regions, per committed transaction.
    pub egress_bytes_per_txn: f64,
    /// Their price for a million committed transactions, if bytes have prices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress_dollars: Option<f64>,
    /// Requests that had not ended when the run did.
    pub outstanding: u32,
    /// The promise that the run broke.
    pub failure: Option<String>,
}

impl Run {
    /// Why the pair cannot be recommended; none if it can.
    pub fn fault(&self) -> Option<&'static str> {
        let RunResult { committed, failed, .. } = self.result;
        let hundredth = committed as f64 * 0.01;
        if self.failure.is_some() {
            Some("fails a check")
        } else if committed == 0 {
            Some("commits no transaction")
        } else if f64::from(self.outstanding) > hundredth.max(self.result.offered_tps) {
            Some("has a growing backlog")
        } else if failed as f64 > hundredth {
            Some("gives up more than 1 % of the transactions")
        } else {
            None
        }
    }
}

/// A pair and its runs.
#[derive(Clone, Debug)]
pub struct Tried {
    /// The pair.
    pub pair: Pair,
    /// One run for each seed.
    pub runs: Vec<Run>,
}

/// The results of the search.
pub struct Found {
    /// The pairs of the last round with their runs, the best first.
    pub finalists: Vec<Tried>,
    /// The best protocol with the naive placement.
    pub naive: Tried,
    /// The recommended protocol with the naive placement.
    pub same_naive: Tried,
    /// A run of the recommended pair for each region, in which that region dies.
    pub deaths: Vec<(RegionId, Run)>,
    /// Number of runs of any length.
    pub count: usize,
}

impl Found {
    /// Whether bytes between regions have prices.
    pub fn is_priced(&self) -> bool {
        self.naive.runs.iter().any(|run| run.egress_dollars.is_some())
    }
}

/// The first `all` pairs, with at most `each` of one protocol, so that several protocols remain.
fn best_of(tried: Vec<Tried>, (all, each): (usize, usize)) -> Vec<Tried> {
    let mut taken: OrdMap<&str, usize> = OrdMap::new();
    let is_one_more = |tried: &Tried| {
        let taken = taken.entry(tried.pair.protocol).or_default();
        *taken += 1;
        *taken <= each
    };
    tried.into_iter().filter(is_one_more).take(all).collect()
}

/// The parameters of the search.
pub struct Search<'a> {
    /// The servers.
    pub placement: &'a Placement,
    /// The workload.
    pub workload: &'a WorkloadArgs,
    /// The course of the last round's runs.
    pub course: &'a Course,
    /// Number of seeds of the last round, from the course's seed on.
    pub seeds: u64,
    /// The objective.
    pub objective: Objective,
    /// The price in dollars of a gigabyte that leaves a region; empty if no prices are given.
    pub prices: OrdMap<RegionId, f64>,
    /// The protocols.
    pub protocols: Vec<&'static str>,
    /// The requirements of placements.
    pub wish: Wish<'a>,
    /// Number of threads.
    pub threads: Option<u16>,
}

impl Search<'_> {
    /// Runs the search.
    ///
    /// # Errors
    /// An argument is wrong, or no pair sustains the load.
    pub fn run(&self) -> anyhow::Result<Found> {
        let candidates = self.wish.candidates();
        let mut count = 0;
        let all: Vec<Pair> = (self.protocols.iter())
            .flat_map(|&protocol| {
                let pair =
                    move |candidate: &Candidate| Pair { protocol, candidate: candidate.clone() };
                candidates.iter().map(pair)
            })
            .collect();
        let first = self.round("first round", all, FIRST, 1, &mut count)?;
        let is_naive = |tried: &Tried| tried.pair.candidate.name == "naive";
        let naive = first
            .iter()
            .find(|tried| is_naive(tried))
            .context("there is no protocol to choose from")?;
        let naive = naive.pair.clone();
        let pairs = best_of(first, SECOND_MAX).into_iter().map(|tried| tried.pair).collect();
        let second = self.round("second round", pairs, SECOND, 1, &mut count)?;
        let mut second = best_of(second, THIRD_MAX);
        for place in 0..second.len().min(MOVED_MAX) {
            if let Some(better) = second.get(place).cloned() {
                let better = self.improve(better, &mut count)?;
                if let Some(tried) = second.get_mut(place) {
                    *tried = better;
                }
            }
        }
        let mut pairs: Vec<Pair> = second.into_iter().map(|tried| tried.pair).collect();
        let length = self.course.duration;
        let mut finalists =
            self.round("finalists", pairs.clone(), length, self.seeds, &mut count)?;
        self.settle_ties(&mut finalists);
        let best = finalists.first().context("no combination was tried")?;
        if let Some(fault) = best.runs.iter().find_map(Run::fault) {
            bail!(
                "no protocol sustains this load at any placement that was tried: the best, {} ({}), {fault}; lower the \
                 load, or use more servers (--servers-per-region) or cores (--cores)",
                best.pair.protocol,
                best.pair.candidate.name
            );
        }
        let same = Pair { protocol: best.pair.protocol, candidate: self.wish.naive() };
        pairs = [same.clone(), naive.clone()].into();
        pairs.dedup();
        let naives = self.round("naive placement", pairs, length, self.seeds, &mut count)?;
        let of = |pair: &Pair| naives.iter().find(|tried| tried.pair == *pair).cloned();
        let naive = of(&naive).context("the naive placement was not tried")?;
        let same_naive = of(&same).context("the naive placement was not tried")?;
        let deaths = self.deaths(&best.pair, &mut count)?;
        Ok(Found { naive, same_naive, deaths, count, finalists })
    }

    /// Sorts the finalists within a hundredth of the best: the default protocol first, then by mean
    /// latency.
    fn settle_ties(&self, finalists: &mut [Tried]) {
        let cost = |tried: &Tried| self.objective.cost(&tried.runs);
        let Some(best) = finalists.first().map(cost) else { return };
        let equal = finalists.iter().take_while(|tried| cost(tried) <= best + best.abs() * TIE);
        let equal = equal.count();
        if let Some(equal) = finalists.get_mut(..equal) {
            let other = |tried: &Tried| tried.pair.protocol != protocols::DEFAULT;
            let mean = |tried: &Tried| Objective::MEAN.mean(&tried.runs);
            equal.sort_by(|a, b| other(a).cmp(&other(b)).then_with(|| mean(a).total_cmp(&mean(b))));
        }
    }

    /// Runs all pairs and returns them sorted, the best first.
    fn round(
        &self,
        what: &'static str,
        pairs: Vec<Pair>,
        length: Duration,
        seeds: u64,
        count: &mut usize,
    ) -> anyhow::Result<Vec<Tried>> {
        let jobs = pairs.len() as u64 * seeds;
        *count += pairs.len() * seeds as usize;
        let course = self.shorter(length);
        let job = |number: u64| {
            let (at, seed) = ((number / seeds) as usize, number % seeds);
            let pair = pairs.get(at).context("no such pair")?;
            let seed = course.seed.wrapping_add(seed);
            let regions = &pair.candidate.regions;
            let run = self.once(pair.protocol, regions, &course, &Schedule::default(), seed)?;
            Ok((at, run))
        };
        let mut tried: Vec<Tried> =
            pairs.iter().cloned().map(|pair| Tried { pair, runs: Vec::new() }).collect();
        Pool::of(self.threads).shown(what, jobs, job, |(at, run)| {
            tried.get_mut(at).context("no such pair")?.runs.push(run);
            Ok(())
        })?;
        for one in &mut tried {
            one.runs.sort_by_key(|run| run.result.seed);
        }
        // Pairs with a fault come last; among equals, the order of the arguments decides.
        tried.sort_by(|a, b| self.objective.cost(&a.runs).total_cmp(&self.objective.cost(&b.runs)));
        Ok(tried)
    }

    /// A course of another length. The warmup is shortened in proportion, but stays long enough for
    /// the election of leaders.
    fn shorter(&self, length: Duration) -> Course {
        let duration = length.min(self.course.duration);
        let warmup = if duration == self.course.duration {
            self.course.warmup()
        } else {
            (duration / 3).min(Duration::from_secs(5))
        };
        Course { duration, warmup: Some(warmup), ..self.course.clone() }
    }

    fn once(
        &self,
        protocol: &str,
        regions: &Regions,
        course: &Course,
        schedule: &Schedule,
        seed: u64,
    ) -> anyhow::Result<Run> {
        let subject = orthodrome_lab::find(protocol)?;
        let cluster = self.placement.cluster_at(regions)?;
        let mut options = course.options(self.workload, seed)?;
        let names: Vec<&str> =
            cluster.gateways().map(|gateway| cluster.topology.name_of(gateway.region)).collect();
        options.load.origins = self.workload.origins(&names)?;
        let workload = self.workload.workload()?;
        let map = cluster.topology.clone();
        let mut simulation = subject.simulation(cluster, workload, schedule, options, None)?;
        let (report, failure) = sim::carry_out(&mut *simulation)?;
        let committed = report.result.committed.max(1) as f64;
        let leaving = |region| report.traffic.leaving(region).bytes as f64 / committed;
        let dollars = |(region, price): (&RegionId, &f64)| leaving(*region) * 1e6 * price / 1e9;
        Ok(Run {
            egress_bytes_per_txn: map.regions().map(leaving).sum(),
            egress_dollars: (!self.prices.is_empty())
                .then(|| self.prices.iter().map(dollars).sum()),
            result: report.result,
            regions: report.regions,
            outstanding: report.outstanding,
            failure: failure.map(|failure| failure.to_string()),
        })
    }

    /// Moves one partition after another to the leader region that is best for it.
    fn improve(&self, mut best: Tried, count: &mut usize) -> anyhow::Result<Tried> {
        let partitions = best.pair.candidate.regions.len().min(MOVED_PARTITIONS_MAX);
        for partition in 0..partitions {
            let Pair { protocol, candidate } = best.pair.clone();
            let moved = self.wish.moved(&candidate, partition);
            let pairs = moved.into_iter().map(|candidate| Pair { protocol, candidate }).collect();
            let tried = self.round("moved leaders", pairs, SECOND, 1, count)?;
            let now = self.objective.cost(&best.runs);
            if let Some(other) = tried.into_iter().next()
                && self.objective.cost(&other.runs) < now - now.abs() * GAIN
            {
                best = other;
            }
        }
        Ok(best)
    }

    /// One run for each region that has replicas: the region dies after a third of the run and
    /// stays dead.
    fn deaths(&self, pair: &Pair, count: &mut usize) -> anyhow::Result<Vec<(RegionId, Run)>> {
        if self.wish.survive == 0 {
            return Ok(Vec::new());
        }
        let held = |region: &RegionId| {
            pair.candidate.regions.iter().any(|replicas| replicas.contains(region))
        };
        let regions: Vec<RegionId> = self.wish.map.regions().filter(held).collect();
        *count += regions.len();
        let cluster = self.placement.cluster_at(&pair.candidate.regions)?;
        let course = self.shorter(SECOND);
        let job = |number: u64| {
            let region = regions.get(number as usize).copied().unwrap_or(RegionId(0));
            let dead = cluster.nodes().filter(|node| node.region == region);
            let dead: Vec<String> = dead.map(|node| format!("\"{}\"", node.id)).collect();
            // The fault lasts beyond the end of the run.
            let text = format!(
                "[[faults]]\nat_ms = {}\nuntil_ms = {}\nfault.crash = {{ nodes = [{}] }}\n",
                course.duration.as_millis() / 3,
                course.duration.as_millis() * 1_000,
                dead.join(", ")
            );
            let schedule = Schedule::parse(&text)?;
            let regions = &pair.candidate.regions;
            let run = self.once(pair.protocol, regions, &course, &schedule, course.seed)?;
            Ok((region, run))
        };
        let mut deaths = Vec::new();
        Pool::of(self.threads).shown("region failures", regions.len() as u64, job, |death| {
            deaths.push(death);
            Ok(())
        })?;
        deaths.sort_by_key(|(region, _)| *region);
        Ok(deaths)
    }
}
