//! The CPU-time model: a node is one queue that its cores serve.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use orthodrome_core::time::{Duration, Time, nanos};
use orthodrome_core::workers::Workers;

/// The cost of processing messages. The defaults are fitted to the processor time of real servers
/// (`docs/simulator.md`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CpuModel {
    /// Cores of each node.
    pub cores: u32,
    /// The most cores that a machine's workers use ([`Workers`]); all cores if none.
    pub workers: Option<u32>,
    /// The cost of receiving and processing one message, whatever its content.
    pub message: Duration,
    /// The cost of encoding and sending one message.
    pub send: Duration,
    /// The cost of each byte received or sent, in picoseconds.
    pub byte_ps: u64,
    /// The cost of each key accessed.
    pub key: Duration,
}

impl Default for CpuModel {
    fn default() -> Self {
        Self {
            cores: 4,
            workers: None,
            message: Duration::from_nanos(9_000),
            send: Duration::from_nanos(4_500),
            byte_ps: 1_000,
            key: Duration::from_nanos(9_000),
        }
    }
}

impl CpuModel {
    /// Core time to receive and process a message with `bytes` bytes that accesses `keys` keys.
    #[must_use]
    pub fn receive_cost(&self, bytes: usize, keys: usize) -> Duration {
        let bytes = (bytes as u64).saturating_mul(self.byte_ps) / 1_000;
        let keys = nanos(self.key).saturating_mul(keys as u64);
        self.message + Duration::from_nanos(bytes.saturating_add(keys))
    }

    /// Core time to send a message of `bytes` bytes.
    #[must_use]
    pub fn send_cost(&self, bytes: usize) -> Duration {
        self.send + Duration::from_nanos((bytes as u64).saturating_mul(self.byte_ps) / 1_000)
    }
}

/// The cores of one node.
#[derive(Clone, Debug)]
pub struct Cpu {
    /// None: infinitely fast.
    model: Option<CpuModel>,
    /// When each core becomes idle.
    idle_at: Vec<Time>,
    /// When the last admitted input will have been processed.
    last: Time,
    /// When the last admitted input is handled of those that go first.
    control: Time,
    /// Faults make everything take this many times as long.
    slowdown: u32,
    busy: Duration,
}

impl Cpu {
    /// Idle cores.
    #[must_use]
    pub fn new(model: Option<CpuModel>) -> Self {
        let cores = model.as_ref().map_or(1, |model| model.cores.max(1));
        let idle_at = vec![Time::ZERO; cores as usize];
        let (last, control) = (Time::ZERO, Time::ZERO);
        Self { model, idle_at, last, control, slowdown: 1, busy: Duration::ZERO }
    }

    /// True if processing takes no time. Just after a slow period it still takes time: an input
    /// that arrives now must not overtake those that wait.
    #[must_use]
    pub fn is_infinite(&self, now: Time) -> bool {
        self.costs_nothing() && self.last.max(self.control) <= now
    }

    fn costs_nothing(&self) -> bool {
        self.model.is_none() && self.slowdown == 1
    }

    /// The time at which an input that arrives now will have been processed. Inputs are processed
    /// in order of arrival: a cheap input on another core does not overtake the previous one.
    pub fn admit(&mut self, now: Time, bytes: usize, keys: usize) -> Time {
        if self.costs_nothing() {
            self.last = self.last.max(now);
            return self.last;
        }
        let cost = self.costs().receive_cost(bytes, keys);
        self.last = self.occupy(now, cost).max(self.last);
        self.last
    }

    /// When an input of [`Lane::Control`] that arrives now has been handled: it waits for what a core
    /// does at this moment and for earlier ones of its lane. Data that comes later waits for a core
    /// as long as for any other input.
    ///
    /// [`Lane::Control`]: orthodrome_core::machine::Lane::Control
    pub fn admit_control(&mut self, now: Time, bytes: usize, keys: usize) -> Time {
        if self.costs_nothing() {
            self.control = self.control.max(now);
            return self.control;
        }
        let costs = self.costs();
        let first = self.idle_at.iter().min().copied().unwrap_or(now);
        let under_way = first.since(now).min(costs.message * self.slowdown);
        let cost = costs.receive_cost(bytes, keys);
        self.occupy(now, cost);
        self.control = self.control.max(now + under_way) + cost * self.slowdown;
        self.control
    }

    /// Charges for a message sent now. It leaves at once; the work delays what comes after it.
    pub fn charge_send(&mut self, now: Time, bytes: usize) {
        if !self.costs_nothing() {
            let cost = self.costs().send_cost(bytes);
            self.occupy(now, cost);
        }
    }

    /// Charges for the work of a machine's workers in a step: the parts of a round run in parallel,
    /// as far as there are workers, and rounds run one after the other. Like sending, it delays
    /// later inputs.
    pub fn charge_work(&mut self, now: Time, rounds: &[Vec<usize>]) {
        if self.costs_nothing() {
            return;
        }
        let CpuModel { key, workers, .. } = self.costs();
        let workers = workers.map_or(self.idle_at.len(), |workers| workers.max(1) as usize);
        let mut begins = now;
        for round in rounds {
            let mut cores = self.best_for(begins);
            cores.truncate(workers);
            let mut ends = begins;
            for &keys in round {
                let cost = key * u32::try_from(keys).unwrap_or(u32::MAX);
                ends = ends.max(self.occupy_one_of(&cores, begins, cost));
            }
            begins = ends;
        }
    }

    /// The cores in the order in which work that begins at `begins` takes them: first those that are
    /// idle then, beginning with the one that became idle last, so that a chain of rounds stays on
    /// one core and leaves the others to messages. The others first finish their current work.
    fn best_for(&self, begins: Time) -> Vec<usize> {
        let rank = |core: &usize| {
            let idle_at = self.idle_at.get(*core).copied().unwrap_or_default();
            (idle_at.max(begins), Reverse(idle_at))
        };
        let mut cores: Vec<usize> = (0..self.idle_at.len()).collect();
        cores.sort_by_key(rank);
        cores
    }

    /// Core time spent so far.
    #[must_use]
    pub fn busy(&self) -> Duration {
        self.busy
    }

    /// A fault slows everything down by `factor` from now on. An infinite CPU becomes a slow one
    /// with the default costs.
    pub fn slow_down(&mut self, factor: u32) {
        self.slowdown = factor.max(1);
    }

    /// The fault ends. The remaining work speeds up by the same factor, counted from now. Returns
    /// that factor.
    pub fn speed_up(&mut self, now: Time) -> u32 {
        let factor = std::mem::replace(&mut self.slowdown, 1);
        for at in self.idle_at.iter_mut().chain([&mut self.last, &mut self.control]) {
            *at = sooner(*at, now, factor);
        }
        factor
    }

    /// Drops all pending work.
    pub fn reset(&mut self, now: Time) {
        self.idle_at.iter_mut().for_each(|at| *at = now);
        (self.last, self.control) = (now, now);
    }

    fn costs(&self) -> CpuModel {
        self.model.unwrap_or_default()
    }

    fn occupy(&mut self, now: Time, cost: Duration) -> Time {
        let first = self.idle_at.iter_mut().min();
        let core = first.unwrap_or_else(|| unreachable!("a node has at least one core"));
        // A product of durations divides, and this runs for every message.
        let cost = if self.slowdown == 1 { cost } else { cost * self.slowdown };
        self.busy += cost;
        *core = (*core).max(now) + cost;
        *core
    }

    fn occupy_one_of(&mut self, cores: &[usize], now: Time, cost: Duration) -> Time {
        let start = |core: usize| self.idle_at.get(core).map(|&at| (at.max(now), Reverse(at)));
        let first = cores.iter().copied().min_by_key(|&core| start(core));
        let core = first.and_then(|core| self.idle_at.get_mut(core));
        let core = core.unwrap_or_else(|| unreachable!("a node has at least one core"));
        let cost = cost * self.slowdown;
        self.busy += cost;
        *core = (*core).max(now) + cost;
        *core
    }
}

/// Runs a machine's work one part after the other, because time stands still during a step. It
/// records the work for the CPU-time model: the keys of each part, by rounds.
#[derive(Debug, Default)]
pub struct Tally {
    rounds: Mutex<Vec<Vec<usize>>>,
    /// True if there is any. Most machines have no workers, and this is asked after every input.
    is_used: AtomicBool,
}

impl Tally {
    /// The work recorded since the last call.
    pub fn take(&self) -> Vec<Vec<usize>> {
        if !self.is_used.load(Ordering::Relaxed) {
            return Vec::new();
        }
        std::mem::take(&mut *self.rounds.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Workers for Tally {
    fn each(&self, costs: &[usize], work: &(dyn Fn(usize) + Sync)) {
        (0..costs.len()).for_each(work);
        if !costs.is_empty() {
            self.is_used.store(true, Ordering::Relaxed);
            self.rounds.lock().unwrap_or_else(PoisonError::into_inner).push(costs.to_vec());
        }
    }
}

/// The new end of work that was to end at `at`, if the rest is `factor` times faster from `now` on.
pub(crate) fn sooner(at: Time, now: Time, factor: u32) -> Time {
    if at > now { now + at.since(now) / factor } else { at }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_core::rng::Rng;

    /// Mean waiting time of Poisson arrivals at a given load, in units of the service time.
    fn mean_wait(cores: u32, load: f64) -> f64 {
        let service = Duration::from_micros(10);
        let model = CpuModel {
            cores,
            workers: None,
            message: service,
            send: Duration::ZERO,
            byte_ps: 0,
            key: service,
        };
        let mut cpu = Cpu::new(Some(model));
        let mut rng = Rng::stream(3, "test", 0);
        let gap = 10_000.0 / (load * f64::from(cores));
        let (mut now, mut waited) = (0.0, 0.0);
        let count = 400_000;
        for _ in 0..count {
            now += -(1.0 - rng.unit()).ln() * gap;
            let at = Time(now as u64);
            waited += cpu.admit(at, 0, 0).since(at + service).as_nanos() as f64;
        }
        waited / f64::from(count) / 10_000.0
    }

    #[test]
    fn one_core_queues_like_m_d_1() {
        // Pollaczek–Khinchine: the mean wait is load / (2 (1 - load)) service times.
        for load in [0.3, 0.5, 0.8] {
            let (found, expected) = (mean_wait(1, load), load / (2.0 * (1.0 - load)));
            assert!((found / expected - 1.0).abs() < 0.05, "{load}: {found}, theory {expected}");
        }
    }

    #[test]
    fn more_cores_wait_less_and_keep_the_order_of_arrival() {
        assert!(mean_wait(4, 0.8) < mean_wait(1, 0.8) / 2.0);
        let mut cpu = Cpu::new(Some(CpuModel { cores: 2, ..CpuModel::default() }));
        let long = cpu.admit(Time::ZERO, 1_000_000, 0);
        assert_eq!(cpu.admit(Time::ZERO, 0, 0), long, "a short message overtook a long one");
    }

    #[test]
    fn control_waits_for_what_is_under_way_and_not_for_what_waits() {
        let model = CpuModel { cores: 1, ..CpuModel::default() };
        let message = model.message;
        let mut cpu = Cpu::new(Some(model));
        let mut last = Time::ZERO;
        for _ in 0..100 {
            last = cpu.admit(Time::ZERO, 0, 0);
        }
        assert_eq!(last, Time::ZERO + message * 100);
        assert_eq!(cpu.admit_control(Time::ZERO, 0, 0), Time::ZERO + message * 2);
        assert_eq!(cpu.admit_control(Time::ZERO, 0, 0), Time::ZERO + message * 3, "in their order");
        assert_eq!(cpu.admit(Time::ZERO, 0, 0), Time::ZERO + message * 103, "it takes its time");
        let idle = Time::from_millis(50);
        assert_eq!(cpu.admit_control(idle, 0, 0), idle + message);
    }

    #[test]
    fn a_slow_node_is_slow_even_if_cpus_are_infinite() {
        let mut cpu = Cpu::new(None);
        assert!(cpu.is_infinite(Time::ZERO));
        cpu.slow_down(10);
        let ready = cpu.admit(Time::ZERO, 0, 0);
        assert_eq!(ready, Time::ZERO + CpuModel::default().message * 10);
        // When the node is fast again, new inputs still wait for earlier ones.
        cpu.slow_down(1);
        assert!(!cpu.is_infinite(Time(1)));
        assert_eq!(cpu.admit(Time(1), 0, 0), ready);
        assert!(cpu.is_infinite(ready));
    }

    /// A control message that arrived just after a slow period overtook those that still waited.
    #[test]
    fn control_keeps_its_order_when_a_slow_period_ends() {
        let mut cpu = Cpu::new(None);
        cpu.slow_down(100);
        let message = CpuModel::default().message;
        let ends: Vec<Time> = (0..3).map(|_| cpu.admit_control(Time::ZERO, 0, 0)).collect();
        assert_eq!(ends[2], Time::ZERO + message * 300);
        cpu.speed_up(Time::ZERO);
        let last = sooner(ends[2], Time::ZERO, 100);
        assert!(!cpu.is_infinite(Time(1)), "control still waits");
        assert_eq!(cpu.admit_control(Time(1), 0, 0), last);
        assert_eq!(cpu.admit(Time(1), 0, 0), Time(1), "data does not wait for control");
        assert!(cpu.is_infinite(last));
    }

    #[test]
    fn waiting_work_speeds_up_when_a_slow_period_ends() {
        let mut cpu = Cpu::new(Some(CpuModel { cores: 1, ..CpuModel::default() }));
        cpu.slow_down(100);
        let now = Time(1_000);
        let ends: Vec<u64> =
            (0..10).map(|_| cpu.admit(now, 0, 0).since(now).as_nanos() as u64).collect();
        assert_eq!((ends[0], ends[9]), (900_000, 9_000_000));
        assert_eq!(cpu.speed_up(now), 100);
        assert_eq!(
            sooner(now + Duration::from_nanos(ends[9]), now, 100).since(now).as_nanos(),
            90_000
        );
        assert_eq!(cpu.admit(now, 0, 0).since(now).as_nanos(), 99_000, "after those that wait");
        assert_eq!(sooner(Time(5), now, 100), Time(5), "what is past stays");
    }

    #[test]
    fn workers_share_a_round_and_rounds_follow_each_other() {
        let key = CpuModel::default().key;
        let ends = |cores, workers, rounds: &[Vec<usize>]| {
            let mut cpu = Cpu::new(Some(CpuModel { cores, workers, ..CpuModel::default() }));
            cpu.charge_work(Time::ZERO, rounds);
            let last = cpu.idle_at.iter().max().unwrap().since(Time::ZERO);
            assert_eq!(
                cpu.busy() / key.as_nanos() as u32,
                Duration::from_nanos(rounds.iter().flatten().sum::<usize>() as u64)
            );
            last.as_nanos() / key.as_nanos()
        };
        let free = [vec![2, 2, 2, 2]];
        let chain = [vec![2], vec![2], vec![2], vec![2]];
        assert_eq!(ends(4, None, &free), 2);
        assert_eq!(ends(2, None, &free), 4);
        assert_eq!(ends(4, Some(2), &free), 4, "as many as there are workers");
        assert_eq!(ends(4, Some(1), &free), 8);
        assert_eq!(
            ends(4, None, &chain),
            8,
            "what conflicts waits for each other on any number of cores"
        );
        assert_eq!(ends(4, None, &[vec![1, 1], vec![3, 1], vec![1]]), 5);
    }

    #[test]
    fn a_chain_of_rounds_leaves_the_other_cores_idle() {
        let key = CpuModel::default().key;
        let mut cpu = Cpu::new(Some(CpuModel { cores: 4, ..CpuModel::default() }));
        cpu.charge_work(Time::ZERO, &vec![vec![1]; 100]);
        let mut idle_at = cpu.idle_at.clone();
        idle_at.sort_unstable();
        assert_eq!(idle_at, [Time::ZERO, Time::ZERO, Time::ZERO, Time::ZERO + key * 100]);
        // The next step's work does not wait for it, if it need not.
        cpu.charge_work(Time::ZERO, &[vec![1, 1, 1]]);
        assert!(cpu.idle_at.iter().filter(|at| **at == Time::ZERO + key).count() == 3);
    }

    #[test]
    fn a_tally_does_everything_once_and_says_what_it_was() {
        let tally = Tally::default();
        let squares = orthodrome_core::workers::each(&tally, &[1, 2, 3], |n| *n, |n| n * n);
        assert_eq!(squares, [1, 4, 9]);
        assert_eq!((tally.take(), tally.take()), (vec![vec![1, 2, 3]], vec![]));
    }
}
