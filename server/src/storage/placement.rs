//! The placement with which a node's data was made.
//!
//! Servers count votes over the servers of a partition, and find a key by its partition. With another
//! placement in its file, a node would acknowledge commits that the others do not have, or miss data
//! that it has. So the data directory has a copy of the placement, in the file `placement.toml`.
//! Some data depends on more: the logs of SLOG and Sloth on the region of each preferred leader, and a
//! server's share on the servers of its region. The copy has that too. It also has the regions of
//! preferred leaders for protocols in which a gateway finds the coordinator of a transaction by them: with
//! others, `Resolve` would ask a group that never heard of it, and take it for aborted.

use std::path::Path;
use std::sync::Arc;

use orthodrome_core::cluster::{Cluster, Partitioning};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::{NodeId, PartitionId, RegionId};
use orthodrome_protocols::deterministic::{self, Orderer, Ordering};
use orthodrome_protocols::{carousel, natto, two_phase_locking};
use serde::{Deserialize, Serialize};

use super::StorageError;
use super::directory::{read_text, replace};

const FILE: &str = "placement.toml";

/// The servers with which the data of some partitions began.
pub type Founders = OrdMap<PartitionId, Vec<NodeId>>;

/// What decides where the data of a cluster is, as text.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// The number of the placement, `map_epoch` in the node's file.
    epoch: u64,
    /// How keys map to partitions, and the number of shares of each region's copy.
    keys: String,
    /// The servers of each partition.
    partitions: OrdMap<String, String>,
    /// The servers of each partition when the data began, if they were others. The partition's log
    /// begins with these members, and knows the changes since.
    #[serde(default, skip_serializing_if = "OrdMap::is_empty")]
    founders: OrdMap<String, String>,
    /// The log that orders each partition, if that follows from preferred leaders. Empty if not, and
    /// in a file of an earlier version.
    #[serde(default, skip_serializing_if = "OrdMap::is_empty")]
    logs: OrdMap<String, String>,
    /// The region of each partition's preferred leader, if coordinators follow from it. Empty if not, and
    /// in a file of an earlier version.
    #[serde(default, skip_serializing_if = "OrdMap::is_empty")]
    coordinators: OrdMap<String, String>,
    /// The share of each server, if values are divided. Empty if not, and in a file of an earlier
    /// version.
    #[serde(default, skip_serializing_if = "OrdMap::is_empty")]
    shares: OrdMap<String, String>,
}

/// The log of each partition, for protocols with one log for the primaries of a region.
fn logs(cluster: &Cluster, protocol: &str) -> OrdMap<String, String> {
    let ordering = match protocol {
        deterministic::SLOTH => Ordering::Regional,
        deterministic::SLOG => Ordering::Ordered(Orderer::Region),
        deterministic::SLOG_CONSENSUS => Ordering::Ordered(Orderer::Consensus),
        _ => return OrdMap::new(),
    };
    let streams = deterministic::Placement::new(Arc::new(cluster.clone()), ordering);
    streams.partitions().map(|(id, stream)| (id.to_string(), stream.to_string())).collect()
}

/// The region of each preferred leader, for protocols whose gateways compute the coordinator of a
/// transaction from it.
fn coordinators(cluster: &Cluster, protocol: &str) -> OrdMap<String, String> {
    use natto::{CP, LECSF, PA, RECSF, TS};
    use two_phase_locking::{BY_AGE, PREEMPT, PREEMPT_ON_WAIT};
    let computed = [carousel::BASIC, carousel::FAST, TS, LECSF, PA, CP, RECSF];
    let computed = computed.into_iter().chain([BY_AGE, PREEMPT, PREEMPT_ON_WAIT]);
    let partitions = cluster.partitions().filter(|_| computed.clone().any(|name| name == protocol));
    let region = |id| (id, cluster.leader_region(id));
    partitions.map(|partition| region(partition.id)).map(texts).collect()
}

fn texts((id, region): (PartitionId, RegionId)) -> (String, String) {
    (id.to_string(), region.to_string())
}

/// The first entry that differs, in both. None if one of them has none at all.
fn differing<'a>(
    held: &'a OrdMap<String, String>,
    wanted: &'a OrdMap<String, String>,
) -> Option<(&'a str, &'a str, &'a str)> {
    if held.is_empty() || wanted.is_empty() {
        return None;
    }
    let value = |of: &'a OrdMap<String, String>, id| of.get(id).map_or("", String::as_str);
    let entries = held.keys().chain(wanted.keys());
    let mut entries = entries.map(|id| (id.as_str(), value(held, id), value(wanted, id)));
    entries.find(|(_, held, wanted)| held != wanted)
}

impl Placement {
    /// The placement of a cluster, and what the data of `protocol` depends on besides.
    #[must_use]
    pub fn of(cluster: &Cluster, protocol: &str) -> Self {
        let names = |ids: &mut dyn Iterator<Item = NodeId>| {
            let names: Vec<String> = ids.map(|id| id.to_string()).collect();
            names.join(" ")
        };
        let keys = match cluster.partitioning() {
            Partitioning::Hash { .. } => "hash".to_owned(),
            Partitioning::Range { starts } => {
                let range = |(start, owner): &(_, _)| format!("{owner} from {start:?}");
                starts.iter().map(range).collect::<Vec<_>>().join(", ")
            }
        };
        let shares = match cluster.shares() {
            0 | 1 => String::new(),
            // A server's share depends on its place among all servers.
            shares => {
                let servers = names(&mut cluster.servers().map(|server| server.id));
                format!(", {shares} shares on {servers}")
            }
        };
        let partitions = cluster.partitions().map(|partition| {
            let mut replicas = partition.replicas.clone();
            replicas.sort_unstable();
            (partition.id.to_string(), names(&mut replicas.into_iter()))
        });
        let share_of = |id: NodeId| (id.to_string(), cluster.share_at(id).0.to_string());
        let is_divided = cluster.shares() > 1;
        let divided = cluster.servers().filter(|_| is_divided).map(|server| share_of(server.id));
        Self {
            epoch: cluster.epoch,
            keys: keys + &shares,
            partitions: partitions.collect(),
            founders: OrdMap::new(),
            logs: logs(cluster, protocol),
            coordinators: coordinators(cluster, protocol),
            shares: divided.collect(),
        }
    }

    /// Compares it with the copy in the data directory, and stores it if there is none, or if it
    /// follows the copy. If `may_move`, the data itself knows the members of a partition, so an
    /// operator may name other servers under a higher epoch. Returns the servers with which the data
    /// of each partition began, if they were others. If the copy `is_needed`, its absence is an error;
    /// otherwise the directory may be of an earlier version.
    ///
    /// # Errors
    /// It is not the placement of the data, or nobody knows whether it is.
    pub fn check(
        &self,
        dir: &Path,
        may_move: bool,
        is_needed: bool,
    ) -> Result<Founders, StorageError> {
        let path = dir.join(FILE);
        let why = "this is not a placement";
        let Some(text) = read_text(&path, why)? else {
            if is_needed {
                return Err(StorageError::NoPlacement { path });
            }
            self.write(&path)?;
            return Ok(Founders::new());
        };
        let corrupt = || StorageError::Corrupt { path: path.clone(), offset: 0, why };
        let held: Self = toml::from_str(&text).map_err(|_| corrupt())?;
        let wanted = self.founded_by(&held);
        let founders = wanted.founders().ok_or_else(corrupt)?;
        if held == wanted {
            return Ok(founders);
        }
        let wrong = |found: String, expected: String, remedy: &'static str| {
            Err(StorageError::WrongPlacement { path: path.clone(), found, expected, remedy })
        };
        if held.keys != self.keys || !held.partitions.keys().eq(self.partitions.keys()) {
            let of = |placement: &Self| {
                format!("keys by {} over {} partitions", placement.keys, placement.partitions.len())
            };
            return wrong(of(&held), of(self), "set them back: data cannot be divided anew");
        }
        if let Some((id, held, wanted)) = differing(&held.logs, &self.logs) {
            let of = |log| format!("{id} in the log {log}");
            let remedy = "set the preferred leaders and the regions of nodes back: this protocol's logs \
                          follow from them";
            return wrong(of(held), of(wanted), remedy);
        }
        if let Some((id, held, wanted)) = differing(&held.shares, &self.shares) {
            let of = |share| format!("share {share} on {id}");
            return wrong(
                of(held),
                of(wanted),
                "set the regions of nodes back: shares follow from them",
            );
        }
        let epoch_held = held.epoch;
        let epoch = |placement: &Self| format!("map_epoch {}", placement.epoch);
        if self.epoch < held.epoch {
            return wrong(epoch(&held), epoch(self), "use the newest file");
        }
        if let Some((id, held, wanted)) = differing(&held.coordinators, &self.coordinators)
            && self.epoch == epoch_held
        {
            let of = |region| format!("the preferred leader of {id} in {region}");
            let remedy = "set the preferred leaders and the regions of nodes back, because `Resolve` finds \
                          the coordinators of transactions by them; or raise `map_epoch` on all nodes \
                          once no client asks for an outcome from before";
            return wrong(of(held), of(wanted), remedy);
        }
        let moved =
            self.partitions.iter().find(|(id, servers)| held.partitions.get(*id) != Some(*servers));
        if let Some((id, servers)) = moved
            && !(may_move && self.epoch > held.epoch)
        {
            let before = held.partitions.get(id).map_or("", String::as_str);
            let remedy = match may_move {
                true => {
                    "set the topology, the nodes and the placement back, or raise `map_epoch` on all nodes after \
                     `change-members` has moved the partition"
                }
                false => {
                    "set the topology, the nodes and the placement back: this protocol cannot move partitions"
                }
            };
            return wrong(format!("{id} on {before}"), format!("{id} on {servers}"), remedy);
        }
        wanted.write(&path)?;
        Ok(founders)
    }

    /// This placement, of data that began as `held` says.
    fn founded_by(&self, held: &Self) -> Self {
        let mut founders = held.founders.clone();
        for (id, servers) in &held.partitions {
            founders.entry(id.clone()).or_insert_with(|| servers.clone());
        }
        founders.retain(|id, servers| self.partitions.get(id) != Some(servers));
        Self { founders, ..self.clone() }
    }

    /// The founders by id. None if a name is none.
    fn founders(&self) -> Option<Founders> {
        let servers = |text: &String| -> Option<Vec<NodeId>> {
            text.split(' ').map(|id| id.parse().ok()).collect()
        };
        let entries = self.founders.iter();
        entries.map(|(id, text)| Some((id.parse().ok()?, servers(text)?))).collect()
    }

    /// Stores it in a directory without data.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn write_new(&self, dir: &Path) -> Result<(), StorageError> {
        self.write(&dir.join(FILE))
    }

    fn write(&self, path: &Path) -> Result<(), StorageError> {
        let text = toml::to_string(self)
            .map_err(|error| StorageError::io("write", path, std::io::Error::other(error)))?;
        replace(path, &text)
    }
}
