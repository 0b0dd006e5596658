//! Candidate placements of the replicas of each partition.

use orthodrome_core::id::RegionId;
use orthodrome_core::topology::Topology;

/// The regions of each partition's replicas, the leader's first.
pub type Regions = Vec<Vec<RegionId>>;

/// A placement with a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Candidate {
    /// The name, which describes the placement.
    pub name: String,
    /// The regions of all replicas.
    pub regions: Regions,
}

/// The requirements of a placement.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a> {
    /// The topology.
    pub map: &'a Topology,
    /// The share of the transactions that begins in each region, by its number.
    pub users: &'a [f64],
    /// Number of partitions.
    pub partitions: usize,
    /// Number of regions that may die without data loss.
    pub survive: usize,
}

/// Maximum number of regions that lead all partitions in one candidate.
const LEADERS_MAX: usize = 3;
/// Number of regions that are tried as the only leader region.
const CENTRES: usize = 3;

impl Wish<'_> {
    /// Minimum number of replicas of each partition.
    pub fn replicas(&self) -> usize {
        2 * self.survive + 1
    }

    /// The placements to try. The first is the naive one, which depends on neither distances nor
    /// users.
    pub fn candidates(&self) -> Vec<Candidate> {
        let all: Vec<RegionId> = self.map.regions().collect();
        let fewest = self.replicas();
        let mut found = vec![self.naive()];
        let mut add = |name: String, regions: Regions| {
            if found.iter().all(|known: &Candidate| !is_same(&known.regions, &regions)) {
                found.push(Candidate { name, regions });
            }
        };
        for replicas in [fewest, fewest + 2] {
            if replicas > all.len() {
                break;
            }
            let more =
                if replicas == fewest { String::new() } else { format!(", {replicas} replicas") };
            add(format!("led everywhere{more}"), self.led_from(&all, replicas));
            if self.users.iter().any(|share| *share != self.users.first().copied().unwrap_or(0.0)) {
                let leaders = self.by_users();
                add(format!("led where users are{more}"), self.led_from(&leaders, replicas));
            }
            for many in 1..=LEADERS_MAX.min(all.len() - 1) {
                let mut sets = subsets(&all, many);
                sets.sort_by(|a, b| {
                    self.cost(a, replicas).total_cmp(&self.cost(b, replicas)).then(a.cmp(b))
                });
                for set in sets.iter().take(if many == 1 { CENTRES } else { 1 }) {
                    let names: Vec<&str> = set.iter().map(|r| self.map.name_of(*r)).collect();
                    let name = format!("led from {}{more}", names.join(", "));
                    add(name, self.led_from(set, replicas));
                }
            }
        }
        found
    }

    /// The naive placement: partition i is led from region i, modulo the number of regions, and its
    /// other replicas are in the following regions.
    pub fn naive(&self) -> Candidate {
        let all: Vec<RegionId> = self.map.regions().collect();
        let at = |partition: usize| {
            let chosen = all.iter().cycle().skip(partition % all.len().max(1));
            chosen.take(self.replicas()).copied().collect()
        };
        Candidate { name: "naive".into(), regions: (0..self.partitions).map(at).collect() }
    }

    /// Variants of a placement, in each of which another region leads one partition.
    pub fn moved(&self, from: &Candidate, partition: usize) -> Vec<Candidate> {
        let Some(now) = from.regions.get(partition) else { return Vec::new() };
        let elsewhere = self.map.regions().filter(|region| now.first() != Some(region));
        let moved = |leader: RegionId| {
            let mut regions = from.regions.clone();
            if let Some(place) = regions.get_mut(partition) {
                *place = self.near(leader, now.len());
            }
            let name = format!("{}; p{partition} from {}", from.name, self.map.name_of(leader));
            Candidate { name, regions }
        };
        elsewhere.map(moved).collect()
    }

    /// Partitions are led from these regions in turn, with the other replicas nearby.
    fn led_from(&self, leaders: &[RegionId], replicas: usize) -> Regions {
        let leaders = leaders.iter().cycle().take(self.partitions);
        leaders.map(|&leader| self.near(leader, replicas)).collect()
    }

    /// A leader region for each partition, so that each region leads partitions in proportion to
    /// its users.
    fn by_users(&self) -> Vec<RegionId> {
        let mut origins = orthodrome_sim::load::Origins::new(self.users.to_vec());
        let dealt = (0..self.partitions).filter_map(|_| origins.deal());
        dealt.filter_map(|at| self.map.regions().nth(at)).collect()
    }

    /// `leader`, and the regions nearest to it.
    fn near(&self, leader: RegionId, replicas: usize) -> Vec<RegionId> {
        let mut regions: Vec<RegionId> = self.map.regions().collect();
        regions.sort_by_key(|&region| (region != leader, self.map.rtt(leader, region), region));
        regions.truncate(replicas);
        regions
    }

    /// An estimate of a transaction's latency, in milliseconds, if it needs all these leaders: the
    /// round trip to the farthest leader, plus the round trip from there to a majority; the mean
    /// over users.
    fn cost(&self, leaders: &[RegionId], replicas: usize) -> f64 {
        let to_majority = |leader: RegionId| {
            let majority = self.near(leader, replicas / 2 + 1);
            majority.last().map_or(0.0, |&last| self.ms(leader, last))
        };
        let of_user = |user: RegionId| {
            let one = |leader: &RegionId| self.ms(user, *leader) + to_majority(*leader);
            leaders.iter().map(one).fold(0.0, f64::max)
        };
        let weighted = self.map.regions().zip(self.users);
        let sum: f64 = weighted.map(|(user, share)| share * of_user(user)).sum();
        sum / self.users.iter().sum::<f64>().max(f64::MIN_POSITIVE)
    }

    fn ms(&self, a: RegionId, b: RegionId) -> f64 {
        self.map.rtt(a, b).as_secs_f64() * 1e3
    }
}

/// Whether both have the same leaders and the same sets of replicas.
fn is_same(a: &Regions, b: &Regions) -> bool {
    let ordered = |replicas: &Vec<RegionId>| {
        let mut others = replicas.clone();
        others.sort_unstable();
        (replicas.first().copied(), others)
    };
    a.iter().map(ordered).eq(b.iter().map(ordered))
}

/// All subsets with `size` elements, each in the given order.
fn subsets(of: &[RegionId], size: usize) -> Vec<Vec<RegionId>> {
    let Some((&first, rest)) = of.split_first() else {
        return if size == 0 { vec![Vec::new()] } else { Vec::new() };
    };
    if size == 0 {
        return vec![Vec::new()];
    }
    let with = subsets(rest, size - 1).into_iter().map(|set| [vec![first], set].concat());
    with.chain(subsets(rest, size)).collect()
}

#[cfg(test)]
mod tests {
    use orthodrome_core::cluster::Cluster;

    use super::*;

    fn names(map: &Topology, regions: &[RegionId]) -> String {
        regions.iter().map(|&region| map.name_of(region)).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_naive_placement_is_that_of_clusters() {
        for name in Topology::built_in_names() {
            let map = Topology::built_in(name).unwrap();
            let users = vec![1.0; map.len()];
            let wish = Wish { map: &map, users: &users, partitions: 7, survive: 1 };
            let cluster = Cluster::spread(map.clone(), 1, 1, 7, 3).unwrap();
            let expected: Regions = cluster
                .partitions()
                .map(|p| p.replicas.iter().map(|&node| cluster.region_of(node)).collect())
                .collect();
            assert_eq!(wish.naive().regions, expected, "{name}");
        }
    }

    #[test]
    fn candidates_are_near_users_and_survive_the_required_failures() {
        let map = Topology::built_in("azure5").unwrap();
        let users = [3.0, 0.0, 1.0, 0.0, 0.0];
        let wish = Wish { map: &map, users: &users, partitions: 4, survive: 1 };
        let found = wish.candidates();
        for Candidate { name, regions } in &found {
            assert_eq!(regions.len(), 4, "{name}");
            for held in regions {
                let mut different = held.clone();
                different.sort_unstable();
                different.dedup();
                assert!(different.len() == held.len() && held.len() >= 3, "{name}: {held:?}");
            }
        }
        let of = |name: &str| {
            let found = found.iter().find(|found| found.name == name).unwrap();
            found.regions.iter().map(|held| names(&map, held)).collect::<Vec<_>>()
        };
        assert_eq!(of("led from VA"), ["VA WA PR"; 4]);
        // Three of four users are in VA.
        let leaders: Vec<String> =
            of("led where users are").iter().map(|held| held[..2].to_owned()).collect();
        assert_eq!(leaders.iter().filter(|leader| *leader == "VA").count(), 3);
        let from = found.iter().find(|found| found.name == "led from VA").unwrap();
        let moved = wish.moved(from, 2);
        assert_eq!(moved.len(), 4);
        assert!(
            moved.iter().all(|other| other.regions[2] != from.regions[2]
                && other.regions[..2] == from.regions[..2])
        );
    }

    #[test]
    fn subsets_are_complete() {
        let all: Vec<RegionId> = (0..5).map(RegionId).collect();
        for (size, count) in [(0, 1), (1, 5), (2, 10), (3, 10), (5, 1)] {
            assert_eq!(subsets(&all, size).len(), count);
        }
    }
}
