//! How many clients there are, where they are, and when they submit transactions.

use std::collections::BTreeMap;

use orthodrome_core::rng::Rng;
use orthodrome_core::time::Duration;
use orthodrome_eval::metrics::Retry;

/// How clients behave.
#[derive(Clone, PartialEq, Debug)]
pub struct LoadModel {
    /// When they ask.
    pub arrival: Arrival,
    /// When an aborted transaction is tried again.
    pub retry: Retry,
    /// How long a client takes to decide an interactive transaction.
    pub decide: Duration,
    /// Transactions begun in the whole run, at most.
    pub transactions_max: u64,
    /// Probability that a client dies with the gateway that it uses.
    pub die_with_gateway: f64,
    /// Which share of the transactions begins in each region, or of the clients is there, by the region's name; in
    /// proportion, so that they need not add up to one. None begins in regions that are not named. Without any, each
    /// gateway has the same.
    pub origins: BTreeMap<String, f64>,
    /// Clients forget what they were told ([`orthodrome_core::machine::NO_SESSIONS`]). For tests.
    pub no_sessions: bool,
}

impl Default for LoadModel {
    fn default() -> Self {
        Self {
            arrival: Arrival::Open { per_second: 100.0, poisson: true },
            retry: Retry::default(),
            decide: Duration::ZERO,
            transactions_max: u64::MAX,
            die_with_gateway: 0.0,
            origins: BTreeMap::new(),
            no_sessions: false,
        }
    }
}

/// Which of several places somebody is at, each by its weight.
#[derive(Clone, Debug)]
pub struct Origins {
    weights: Vec<f64>,
    dealt: Vec<f64>,
}

impl Origins {
    /// Places with these weights, which are not below zero.
    #[must_use]
    pub fn new(weights: Vec<f64>) -> Self {
        let dealt = vec![0.0; weights.len()];
        Self { weights, dealt }
    }

    /// A place at random; none if none has any weight.
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

    /// The place of the next of many, so that at all times each has its part of them; with equal weights, in turns.
    pub fn deal(&mut self) -> Option<usize> {
        let places = self.weights.iter().zip(&self.dealt).enumerate();
        let with_weight = places.filter(|(_, (weight, _))| **weight > 0.0);
        let after = with_weight.map(|(place, (weight, dealt))| ((dealt + 1.0) / weight, place));
        let (_, place) = after.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))?;
        *self.dealt.get_mut(place)? += 1.0;
        Some(place)
    }
}

/// When transactions are begun.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Arrival {
    /// At a rate, whatever the system's answers.
    Open {
        /// Over all clients.
        per_second: f64,
        /// Exponential gaps between arrivals, rather than equal ones.
        poisson: bool,
    },
    /// Each client begins its next transaction when the last has ended.
    Closed {
        /// How many clients there are.
        clients: u32,
        /// How long a client waits in between.
        think: Duration,
    },
}
