//! The number of clients, their regions, and when they submit transactions.

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::Duration;
use orthodrome_eval::metrics::Retry;

/// The behaviour of clients.
#[derive(Clone, PartialEq, Debug)]
pub struct LoadModel {
    /// When they submit transactions.
    pub arrival: Arrival,
    /// When an aborted transaction is retried.
    pub retry: Retry,
    /// How long a client takes to decide an interactive transaction.
    pub decide: Duration,
    /// The most transactions submitted in the whole run.
    pub transactions_max: u64,
    /// Probability that a client dies together with its gateway.
    pub die_with_gateway: f64,
    /// The share of the transactions that each region submits, or of the clients that are in it, by
    /// the region's name. Shares are relative and need not add up to one. Regions that are not
    /// named have none. If empty, each gateway has the same share.
    pub origins: OrdMap<String, f64>,
    /// Clients forget the versions that they have seen ([`orthodrome_core::machine::NO_SESSIONS`]).
    /// For tests.
    pub no_sessions: bool,
    /// Scans do not list names again after they have read. For tests.
    pub no_second_list: bool,
    /// Watches do not wait for unfinished transactions: a mistake.
    pub hasty_watches: bool,
}

impl Default for LoadModel {
    fn default() -> Self {
        Self {
            arrival: Arrival::Open { per_second: 100.0, poisson: true },
            retry: Retry::default(),
            decide: Duration::ZERO,
            transactions_max: u64::MAX,
            die_with_gateway: 0.0,
            origins: OrdMap::new(),
            no_sessions: false,
            no_second_list: false,
            hasty_watches: false,
        }
    }
}

/// Chooses one of several places by their weights.
#[derive(Clone, Debug)]
pub struct Origins {
    weights: Vec<f64>,
    dealt: Vec<f64>,
}

impl Origins {
    /// Places with these weights, none of them negative.
    #[must_use]
    pub fn new(weights: Vec<f64>) -> Self {
        let dealt = vec![0.0; weights.len()];
        Self { weights, dealt }
    }

    /// A random place; none if no place has a weight.
    pub fn draw(&self, rng: &mut Rng) -> Option<usize> {
        let mut left = rng.unit() * self.weights.iter().sum::<f64>();
        let mut last = None;
        for (place, &weight) in self.weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0)
        {
            last = Some(place);
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
        last
    }

    /// The place of the next of many, so that every place has its share at all times; with equal
    /// weights, in turn.
    pub fn deal(&mut self) -> Option<usize> {
        let places = self.weights.iter().zip(&self.dealt).enumerate();
        let with_weight = places.filter(|(_, (weight, _))| **weight > 0.0);
        let after = with_weight.map(|(place, (weight, dealt))| ((dealt + 1.0) / weight, place));
        let (_, place) = after.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))?;
        *self.dealt.get_mut(place)? += 1.0;
        Some(place)
    }
}

/// When transactions are submitted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Arrival {
    /// At a rate, independent of the system's answers.
    Open {
        /// The rate over all clients.
        per_second: f64,
        /// True: exponential gaps between arrivals. False: equal gaps.
        poisson: bool,
    },
    /// Each client submits its next transaction when the previous one has ended.
    Closed {
        /// The number of clients.
        clients: u32,
        /// How long a client waits between transactions.
        think: Duration,
    },
}
