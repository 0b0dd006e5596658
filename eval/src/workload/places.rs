//! The placement of a workload's data: names, such as a warehouse's number in braces, grouped by
//! the region that leads their partition.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::RegionId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::Duration;
use orthodrome_core::txn::Key;

/// Regions with a shorter round trip between them are close; others are far. Sloth §5.1 calls
/// regions of one continent close. On its topology those are exactly the pairs below this bound.
pub const CLOSE: Duration = Duration::from_millis(50);

/// The reach of a transaction: how far its data is from the client's region.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Reach {
    /// It touches only partitions that the client's region leads.
    Local,
    /// It also touches partitions led from a region less than 50 ms away.
    Close,
    /// It also touches partitions led from further away.
    Far,
}

impl Reach {
    /// All values, nearest first.
    pub const ALL: [Self; 3] = [Self::Local, Self::Close, Self::Far];

    /// Its name in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Close => "close",
            Self::Far => "far",
        }
    }

    /// The reach from one region to another.
    #[must_use]
    pub fn between(cluster: &Cluster, from: RegionId, to: RegionId) -> Self {
        if from == to {
            Self::Local
        } else if cluster.topology.rtt(from, to) < CLOSE {
            Self::Close
        } else {
            Self::Far
        }
    }
}

/// The same number of names in each region that leads a partition.
#[derive(Clone, Debug)]
pub(super) struct Places {
    /// Names by region, in the order of the regions' ids. Regions that lead nothing are left out.
    names: Vec<Vec<i64>>,
    /// For each region of the cluster, the index of the nearest entry of `names`.
    homes: OrdMap<RegionId, usize>,
    /// The reach between two entries of `names`.
    reach: Vec<Vec<Reach>>,
    /// For each entry of `names`, the nearest other one.
    nearest: Vec<Option<usize>>,
}

/// How many names are tried for each wanted name, before a region stays with fewer. A region that
/// leads one partition of a thousand still gets its names.
const TRIES: i64 = 20_000;

impl Places {
    /// `count` names in one region, for callers without a cluster.
    pub fn alone(count: i64) -> Self {
        Self {
            names: vec![(0..count).collect()],
            homes: OrdMap::new(),
            reach: vec![vec![Reach::Local]],
            nearest: vec![None],
        }
    }

    /// `count` names for each region: the first numbers whose keys it leads.
    pub fn of(cluster: &Cluster, count: i64) -> Self {
        let mut by_region: OrdMap<RegionId, Vec<i64>> = OrdMap::new();
        for partition in cluster.partitions() {
            by_region.entry(cluster.leader_region(partition.id)).or_default();
        }
        let wanted = usize::try_from(count).unwrap_or(usize::MAX);
        let mut missing = by_region.len();
        for name in 0..count.saturating_mul(TRIES) {
            if missing == 0 {
                break;
            }
            let key = Key::from(format!("{{{name}}}"));
            let region = cluster.leader_region(cluster.partition_of(&key));
            let Some(names) = by_region.get_mut(&region) else { continue };
            if names.len() < wanted {
                names.push(name);
                missing -= usize::from(names.len() == wanted);
            }
        }
        by_region.retain(|_, names| !names.is_empty());
        let regions: Vec<RegionId> = by_region.keys().copied().collect();
        let rtt = |from: RegionId, to: RegionId| cluster.topology.rtt(from, to);
        let nearest = |from: RegionId, but: Option<usize>| {
            let others = regions.iter().enumerate().filter(|(at, _)| Some(*at) != but);
            others.min_by_key(|(at, to)| (rtt(from, **to), *at)).map(|(at, _)| at)
        };
        let homes = cluster.topology.regions();
        let homes = homes.filter_map(|region| Some((region, nearest(region, None)?))).collect();
        let reach = |&from: &RegionId| {
            regions.iter().map(|&to| Reach::between(cluster, from, to)).collect::<Vec<_>>()
        };
        Self {
            homes,
            reach: regions.iter().map(reach).collect(),
            nearest: (0..).zip(&regions).map(|(at, &region)| nearest(region, Some(at))).collect(),
            names: by_region.into_values().collect(),
        }
    }

    /// The home of a client in `region`.
    pub fn home(&self, region: RegionId) -> usize {
        self.homes.get(&region).copied().unwrap_or_default()
    }

    /// The names of an entry.
    pub fn names(&self, place: usize) -> &[i64] {
        self.names.get(place).map(Vec::as_slice).unwrap_or_default()
    }

    /// The names of every entry.
    pub fn all(&self) -> impl Iterator<Item = &[i64]> {
        self.names.iter().map(Vec::as_slice)
    }

    /// One name of an entry; 0 if it has none.
    pub fn pick(&self, place: usize, rng: &mut Rng) -> i64 {
        rng.pick(self.names(place)).copied().unwrap_or_default()
    }

    /// Another entry, all equally likely; the same one if there is no other.
    pub fn other(&self, home: usize, rng: &mut Rng) -> usize {
        let others = (self.names.len() as u64).saturating_sub(1);
        let drawn = usize::try_from(rng.below(others)).unwrap_or_default();
        match drawn {
            _ if others == 0 => home,
            drawn if drawn >= home => drawn + 1,
            drawn => drawn,
        }
    }

    /// An entry with this reach from `home`, all equally likely. If none is close, the nearest one;
    /// if none is far, any other.
    pub fn other_at(&self, home: usize, reach: Reach, rng: &mut Rng) -> usize {
        let distances = self.reach.get(home).map(Vec::as_slice).unwrap_or_default();
        let fitting: Vec<usize> =
            (0..).zip(distances).filter(|(_, at)| **at == reach).map(|(place, _)| place).collect();
        match (rng.pick(&fitting), reach) {
            (Some(&place), _) => place,
            (None, Reach::Local) => home,
            (None, Reach::Close) => self.nearest.get(home).copied().flatten().unwrap_or(home),
            (None, Reach::Far) => self.other(home, rng),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_core::topology::Topology;

    fn azure6(partitions: u32) -> Cluster {
        let map = Topology::built_in("azure6").unwrap();
        Cluster::spread(map, 1, 1, partitions, 3).unwrap()
    }

    #[test]
    fn every_region_has_names_that_are_led_from_it() {
        let cluster = azure6(12);
        let places = Places::of(&cluster, 7);
        for region in cluster.topology.regions() {
            let home = places.home(region);
            assert_eq!(places.names(home).len(), 7);
            for name in places.names(home) {
                let key = Key::from(format!("stock{{{name}}}:5"));
                assert_eq!(cluster.leader_region(cluster.partition_of(&key)), region);
            }
        }
    }

    #[test]
    fn regions_that_lead_nothing_are_served_by_the_nearest() {
        // Partitions are led from EastUS, EastUS2 and SEAsia.
        let places = Places::of(&azure6(3), 2);
        assert_eq!(places.all().count(), 3);
        let homes: Vec<usize> = (0..6).map(|region| places.home(RegionId(region))).collect();
        assert_eq!(homes, [0, 1, 2, 2, 0, 0]);
    }

    #[test]
    fn close_and_far_are_as_on_the_map() {
        let places = Places::of(&azure6(6), 2);
        let mut rng = Rng::stream(1, "places", 0);
        let mut seen = OrdMap::<(usize, Reach), Vec<usize>>::new();
        for _ in 0..200 {
            for home in 0..6 {
                for reach in Reach::ALL {
                    seen.entry((home, reach))
                        .or_default()
                        .push(places.other_at(home, reach, &mut rng));
                }
                assert_ne!(places.other(home, &mut rng), home);
            }
        }
        for (home, pair) in [(0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)] {
            assert!(seen[&(home, Reach::Close)].iter().all(|place| *place == pair));
            let mut far = seen[&(home, Reach::Far)].clone();
            far.sort_unstable();
            far.dedup();
            let expected: Vec<usize> = (0..6).filter(|at| *at != home && *at != pair).collect();
            assert_eq!(far, expected);
        }
        let alone = Places::alone(3);
        assert_eq!((alone.other(0, &mut rng), alone.other_at(0, Reach::Far, &mut rng)), (0, 0));
    }
}
