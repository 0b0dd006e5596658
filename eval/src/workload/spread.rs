//! The choice of a transaction's keys: Zipf and contention-index distributions, and weighted
//! choice.
//!
//! Of all workload code, only this file uses floating point. `exp`, `ln` and the like come from the
//! platform's mathematical library. So a seed draws the same keys in debug and release builds of
//! one platform, and may draw others on another platform.

use orthodrome_core::rng::Rng;

use super::{Issuer, WorkloadError};

/// A Zipf distribution over ranks `0..ranks`: rank `r` has weight `(r + 1)^-theta`.
///
/// Drawn by rejection-inversion (W. Hörmann and G. Derflinger, "Rejection-inversion to generate
/// variates from monotone discrete distributions", ACM TOMACS 6(3), 1996): exact for every
/// `theta >= 0`, in constant time and without a table.
#[derive(Clone, Debug)]
pub struct Zipf {
    ranks: u64,
    theta: f64,
    /// The area under the hat left of the first rank's own rectangle, and of all ranks.
    area: (f64, f64),
    /// Points at most this far below their rank are accepted without computing the weight.
    squeeze: f64,
}

/// The most draws before [`Zipf::draw`] gives up on rejection. Each is accepted with a probability
/// above one half, so the bound is never reached in practice; it only bounds the loop.
const DRAWS_MAX: u32 = 200;

impl Zipf {
    /// A distribution over `ranks` ranks (at least one) with exponent `theta`; 0 is uniform.
    #[must_use]
    pub fn new(ranks: u64, theta: f64) -> Self {
        let mut zipf = Self { ranks: ranks.max(1), theta, area: (0.0, 0.0), squeeze: 0.0 };
        zipf.area = (zipf.integral(1.5) - 1.0, zipf.integral(zipf.ranks as f64 + 0.5));
        zipf.squeeze = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.weight(2.0));
        zipf
    }

    /// How many ranks there are.
    #[must_use]
    pub fn ranks(&self) -> u64 {
        self.ranks
    }

    /// A rank, from 0; smaller ranks are more likely.
    pub fn draw(&self, rng: &mut Rng) -> u64 {
        if self.theta == 0.0 {
            return rng.below(self.ranks);
        }
        let (low, high) = self.area;
        for _ in 0..DRAWS_MAX {
            let area = high + rng.unit() * (low - high);
            let point = self.inverse(area);
            let rank = point.round().clamp(1.0, self.ranks as f64);
            if rank - point <= self.squeeze || area >= self.integral(rank + 0.5) - self.weight(rank)
            {
                return rank as u64 - 1;
            }
        }
        0
    }

    fn weight(&self, x: f64) -> f64 {
        (-self.theta * x.ln()).exp()
    }

    /// The integral of `weight` from 1 to `x`. Written with `exp_m1` so that it is continuous in
    /// `theta` at 1, where the antiderivative is the logarithm.
    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        let t = (1.0 - self.theta) * log;
        if t.abs() < 1e-8 { log * (1.0 + t / 2.0) } else { log * t.exp_m1() / t }
    }

    /// The `x` whose integral is `area`.
    fn inverse(&self, area: f64) -> f64 {
        // Rounding can push the argument just past the pole of the logarithm.
        let t = ((1.0 - self.theta) * area).max(-1.0);
        let log = if t.abs() < 1e-8 { area * (1.0 - t / 2.0) } else { area * t.ln_1p() / t };
        log.exp()
    }
}

/// How keys are chosen for a transaction that touches several distinct ones.
#[derive(Clone, Debug)]
pub enum Spread {
    /// Every key by one Zipf distribution.
    Zipf {
        /// How popular each rank is.
        ranks: Zipf,
        /// How many keys share each rank, all equally likely.
        keys_per_rank: u64,
        /// Share of the draws that choose among the keys of a rank; the others take the key that
        /// has the rank's number.
        rank_share: f64,
    },
    /// One of `hot` hot keys, and cold keys otherwise (Ocean Vista §6.1).
    ContentionIndex {
        /// How many of the keys, the first ones, are hot.
        hot: u64,
        /// How many keys there are.
        keys: u64,
    },
    /// Each client has its own hot key and its own range of cold keys, so that no two of the first
    /// `hot` clients ever conflict (Ocean Vista §6.2.3).
    ContentionIndexFixed {
        /// How many of the keys, the first ones, are hot.
        hot: u64,
        /// How many keys there are.
        keys: u64,
    },
}

/// Rejected draws per key before the rest of a set is filled with the most popular remaining keys.
/// Only extreme skews, where nearly every draw hits the same few keys, reach it.
const REPEATS_MAX: usize = 64;

impl Spread {
    /// `count` distinct keys in the order drawn; a hot key comes first. At most as many as there
    /// are.
    pub fn pick(&self, count: usize, issuer: Issuer, rng: &mut Rng) -> Vec<u64> {
        match *self {
            Self::Zipf { ref ranks, keys_per_rank, rank_share } => {
                let draw = |rng: &mut Rng| {
                    let rank = ranks.draw(rng);
                    if keys_per_rank == 1 || (rank_share < 1.0 && rng.unit() >= rank_share) {
                        rank
                    } else {
                        rank * keys_per_rank + rng.below(keys_per_rank)
                    }
                };
                distinct(Vec::new(), count, 0, self.widest(), draw, rng)
            }
            Self::ContentionIndex { hot, keys } => {
                let first = vec![rng.below(hot)];
                let cold = |rng: &mut Rng| hot + rng.below(keys - hot);
                distinct(first, count, hot, keys, cold, rng)
            }
            Self::ContentionIndexFixed { hot, keys } => {
                let client = u64::from(issuer.index) % hot.max(1);
                let width = (keys - hot) / hot.max(1);
                let low = hot + client * width;
                let cold = |rng: &mut Rng| low + rng.below(width);
                distinct(vec![client], count, low, low + width, cold, rng)
            }
        }
    }

    /// The largest number of distinct keys that one transaction can draw.
    #[must_use]
    pub fn widest(&self) -> u64 {
        match *self {
            Self::Zipf { ref ranks, keys_per_rank, .. } => ranks.ranks() * keys_per_rank,
            Self::ContentionIndex { hot, keys } => 1 + (keys - hot),
            Self::ContentionIndexFixed { hot, keys } => 1 + (keys - hot) / hot.max(1),
        }
    }

    /// The contention-index distribution in which a share `index` of `keys` keys is hot.
    ///
    /// # Errors
    /// If no key would be hot, or none would be cold.
    pub fn contention_index(keys: u64, index: f64, is_fixed: bool) -> Result<Self, WorkloadError> {
        let hot = (keys as f64 * index).round() as u64;
        if hot == 0 || hot >= keys {
            return Err(WorkloadError::Option {
                field: "contention_index",
                problem: format!("a share of {index} of {keys} keys is {hot} hot keys"),
                remedy: "use a share with at least one hot and one cold key".into(),
            });
        }
        Ok(if is_fixed {
            Self::ContentionIndexFixed { hot, keys }
        } else {
            Self::ContentionIndex { hot, keys }
        })
    }
}

/// Adds draws to `keys` until it has `count` different ones; the new ones are in `low..high`.
fn distinct(
    mut keys: Vec<u64>,
    count: usize,
    low: u64,
    high: u64,
    draw: impl Fn(&mut Rng) -> u64,
    rng: &mut Rng,
) -> Vec<u64> {
    for _ in 0..count * REPEATS_MAX {
        if keys.len() >= count {
            return keys;
        }
        let key = draw(rng);
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    for key in low..high {
        if keys.len() >= count {
            break;
        }
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    keys
}

/// One of `items`, each with a probability proportional to its weight; none if the weights are 0.
pub fn weighted<'a, T>(items: &'a [(u64, T)], rng: &mut Rng) -> Option<&'a T> {
    let mut left = rng.below(items.iter().map(|(weight, _)| weight).sum());
    for (weight, item) in items {
        match left.checked_sub(*weight) {
            None => return Some(item),
            Some(rest) => left = rest,
        }
    }
    None
}

/// True with probability `share`.
pub fn chance(share: f64, rng: &mut Rng) -> bool {
    rng.unit() < share
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_core::id::{ClientId, RegionId};

    const DRAWS: u64 = 400_000;

    fn issuer(index: u32) -> Issuer {
        Issuer { client: ClientId(u64::from(index) + 1), index, region: RegionId(0) }
    }

    /// Compares observed counts with the exact distribution: 99.99th percentile of chi-square with
    /// `k` degrees of freedom is below `k + 4 sqrt(2k) + 12`.
    fn assert_fits(counts: &[u64], weights: &[f64], what: &str) {
        let (draws, total) = (counts.iter().sum::<u64>() as f64, weights.iter().sum::<f64>());
        let mut chi_square = 0.0;
        for (count, weight) in counts.iter().zip(weights) {
            let expected = draws * weight / total;
            assert!(expected > 5.0, "{what}: too few draws for a chi-square test");
            chi_square += (*count as f64 - expected).powi(2) / expected;
        }
        let k = counts.len() as f64 - 1.0;
        let bound = k + 4.0 * (2.0 * k).sqrt() + 12.0;
        assert!(chi_square < bound, "{what}: chi-square {chi_square} above {bound}");
    }

    #[test]
    fn zipf_draws_fit_the_exact_distribution() {
        for theta in [0.0, 0.3, 0.5, 0.65, 0.75, 0.95, 1.0, 1.000_000_001, 1.2, 1.5, 2.0, 5.0, 10.0]
        {
            for ranks in [1_u64, 2, 10, 1_000, 1_000_000] {
                let zipf = Zipf::new(ranks, theta);
                let mut rng = Rng::stream(11, "zipf", ranks);
                // Bin the ranks so that each bin expects enough draws: powers of two.
                let bin = |rank: u64| (u64::BITS - (rank + 1).leading_zeros() - 1) as usize;
                let bins = bin(ranks - 1) + 1;
                let (mut counts, mut weights) = (vec![0; bins], vec![0.0; bins]);
                for rank in 0..ranks {
                    weights[bin(rank)] += ((rank + 1) as f64).powf(-theta);
                }
                for _ in 0..DRAWS / 4 {
                    let rank = zipf.draw(&mut rng);
                    assert!(rank < ranks);
                    counts[bin(rank)] += 1;
                }
                // Merge bins from the right until each expects more than five draws.
                let total: f64 = weights.iter().sum();
                let least = 6.0 * total / (DRAWS as f64 / 4.0);
                while counts.len() > 1 && weights[counts.len() - 1] < least {
                    let (count, weight) = (counts.pop().unwrap(), weights.pop().unwrap());
                    *counts.last_mut().unwrap() += count;
                    *weights.last_mut().unwrap() += weight;
                }
                // A uniform distribution expects almost nothing on the first ranks; merge bins
                // there too.
                while counts.len() > 1 && weights[0] < least {
                    let (count, weight) = (counts.remove(0), weights.remove(0));
                    counts[0] += count;
                    weights[0] += weight;
                }
                assert_fits(&counts, &weights, &format!("theta {theta}, {ranks} ranks"));
            }
        }
    }

    #[test]
    fn zipf_draws_fit_rank_by_rank() {
        for theta in [0.65, 1.0, 1.5] {
            let (zipf, mut rng) = (Zipf::new(40, theta), Rng::stream(12, "zipf", 0));
            let mut counts = vec![0; 40];
            for _ in 0..DRAWS {
                counts[zipf.draw(&mut rng) as usize] += 1;
            }
            let weights: Vec<f64> = (1..=40).map(|rank| f64::from(rank).powf(-theta)).collect();
            assert_fits(&counts, &weights, &format!("theta {theta}"));
        }
    }

    #[test]
    fn a_draw_takes_fewer_than_two_tries() {
        for theta in [0.01, 0.65, 1.0, 1.5, 4.0] {
            let zipf = Zipf::new(1_000_000, theta);
            let mut rng = Rng::stream(13, "zipf", 0);
            let mut shadow = rng.clone();
            for _ in 0..10_000 {
                zipf.draw(&mut rng);
            }
            let mut tries = 0;
            while shadow != rng {
                shadow.next_u64();
                tries += 1;
            }
            assert!(tries < 20_000, "theta {theta}: {tries} tries for 10000 draws");
        }
    }

    #[test]
    fn a_wrong_exponent_would_be_noticed() {
        let (zipf, mut rng) = (Zipf::new(40, 0.70), Rng::stream(12, "zipf", 0));
        let mut counts = vec![0; 40];
        for _ in 0..DRAWS {
            counts[zipf.draw(&mut rng) as usize] += 1;
        }
        let weights: Vec<f64> = (1..=40).map(|rank| f64::from(rank).powf(-0.65)).collect();
        let verdict = std::panic::catch_unwind(|| assert_fits(&counts, &weights, "0.65"));
        assert!(verdict.is_err(), "the test cannot tell 0.65 from 0.70");
    }

    #[test]
    fn keys_of_one_transaction_differ_whatever_the_skew() {
        for theta in [0.0, 0.95, 1.5, 8.0] {
            let spread =
                Spread::Zipf { ranks: Zipf::new(12, theta), keys_per_rank: 1, rank_share: 1.0 };
            let mut rng = Rng::stream(3, "t", 0);
            for _ in 0..200 {
                let mut keys = spread.pick(10, issuer(0), &mut rng);
                assert_eq!(keys.len(), 10, "theta {theta}");
                keys.sort_unstable();
                keys.dedup();
                assert_eq!(keys.len(), 10, "theta {theta}");
                assert!(keys.iter().all(|key| *key < 12));
            }
        }
    }

    #[test]
    fn keys_of_one_rank_are_equally_likely() {
        let weight = |rank: u32| f64::from(rank + 1).powf(-0.65);
        for rank_share in [1.0, 0.35] {
            let spread = Spread::Zipf { ranks: Zipf::new(8, 0.65), keys_per_rank: 5, rank_share };
            let (mut rng, mut counts) = (Rng::stream(3, "t", 0), vec![0; 40]);
            for _ in 0..DRAWS {
                counts[spread.pick(1, issuer(0), &mut rng)[0] as usize] += 1;
            }
            let own = |key: u32| if key < 8 { (1.0 - rank_share) * weight(key) } else { 0.0 };
            let weights: Vec<f64> =
                (0..40).map(|key| rank_share * weight(key / 5) / 5.0 + own(key)).collect();
            assert_fits(&counts, &weights, "five keys a rank");
            assert_eq!(spread.widest(), 40);
        }
    }

    #[test]
    fn a_contention_index_gives_one_hot_key_and_cold_ones() {
        let spread = Spread::contention_index(10_000, 0.001, false).unwrap();
        let mut rng = Rng::stream(3, "t", 0);
        let mut counts = vec![0; 10];
        for _ in 0..20_000 {
            let keys = spread.pick(4, issuer(5), &mut rng);
            counts[keys[0] as usize] += 1;
            assert!(keys[1..].iter().all(|key| (10..10_000).contains(key)), "{keys:?}");
        }
        assert_fits(&counts, &[1.0; 10], "hot keys");
        assert!(Spread::contention_index(100, 0.001, false).is_err());
        assert!(Spread::contention_index(100, 1.0, false).is_err());
    }

    #[test]
    fn clients_with_fixed_hot_keys_never_share_a_key() {
        let spread = Spread::contention_index(10_000, 0.001, true).unwrap();
        let mut rng = Rng::stream(3, "t", 0);
        let mut owner = orthodrome_core::ordered::OrdMap::new();
        for round in 0..5_000_u32 {
            let client = round % 10;
            let keys = spread.pick(4, issuer(client), &mut rng);
            assert_eq!(keys[0], u64::from(client));
            for key in keys {
                assert_eq!(*owner.entry(key).or_insert(client), client, "key {key}");
            }
        }
    }
}
