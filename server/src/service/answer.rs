//! Converts outcomes and descriptions to answers.

use std::time::Duration;

use orthodrome_core::cluster::{Partitioning, Role};
use orthodrome_core::machine::{
    Gauge, GroupView, MembershipOrder, OrderState, Refusal, UNKNOWABLE,
};
use orthodrome_core::scan::{KeyRange, Page, ScanError};
use orthodrome_core::txn::{AbortReason, Reads, Version};
use orthodrome_core::watch::{Batch, Change, WatchError};
use orthodrome_core::{Cluster, Key, NodeId, Outcome, TxnId};
use tonic::Status;

use super::access::DEFAULT_KEYSPACE;
use super::api;
use super::{LEADER, REGISTER, refuse};
use crate::gateway::{Description, Finished, GatewayError, OrderError};
use crate::leases::LeaseError;
use crate::scan::ScanFailed;
use crate::transport::LinkStatus;

pub(super) fn outcome(finished: &Finished) -> Option<api::Outcome> {
    use api::outcome::Result;
    let result = match finished.outcome {
        Outcome::Committed(timestamp) => {
            Result::Committed(api::Committed { timestamp: timestamp.0 })
        }
        Outcome::Aborted(reason) => {
            let (code, retryable) = abort_reason(reason);
            Result::Aborted(api::Aborted { reason: code.into(), retryable })
        }
        Outcome::Unknown => {
            Result::Unknown(api::Unknown { is_forgotten: finished.path == UNKNOWABLE })
        }
    };
    Some(api::Outcome { result: Some(result) })
}

/// The reason's number in the API, and whether a retry may succeed without any other change.
fn abort_reason(reason: AbortReason) -> (api::AbortReason, bool) {
    match reason {
        AbortReason::Conflict => (api::AbortReason::Conflict, true),
        AbortReason::StaleRead => (api::AbortReason::StaleRead, true),
        AbortReason::Client => (api::AbortReason::Client, false),
        AbortReason::Guard => (api::AbortReason::Guard, false),
        AbortReason::Recovery => (api::AbortReason::Recovery, true),
        AbortReason::Abandoned => (api::AbortReason::Abandoned, true),
        AbortReason::Overload => (api::AbortReason::Overload, true),
        AbortReason::Invalid => (api::AbortReason::Invalid, false),
        AbortReason::TooLarge => (api::AbortReason::TooLarge, false),
    }
}

/// Bytes of keys and values.
pub(super) fn reads_bytes(reads: &Reads) -> usize {
    let value = |read: &orthodrome_core::txn::Read| read.value.as_ref().map_or(0, |v| v.len());
    reads.iter().map(|(key, read)| key.len() + value(read)).sum()
}

pub(super) fn reads(reads: Reads) -> Vec<api::KeyRead> {
    let read = |(key, read): (orthodrome_core::Key, orthodrome_core::txn::Read)| api::KeyRead {
        key: key.to_bytes(),
        value: read.value.map(|value| value.0),
        version: Some(version(read.version)),
    };
    reads.into_iter().map(read).collect()
}

/// A page of a scan of `range`, as much of it as fits into an answer.
pub(super) fn page(
    page: Page,
    range: KeyRange,
    backwards: bool,
    keys_only: bool,
    bytes_max: usize,
) -> api::ScanResponse {
    let Page { rows, mut rest, timestamp } = page;
    let (mut bytes, mut answered) = (0, Vec::new());
    for (key, read) in rows {
        let value = read.value.map(|value| value.0).filter(|_| !keys_only);
        // The version and the lengths take some bytes too.
        bytes += key.len() + value.as_ref().map_or(0, bytes::Bytes::len) + 64;
        if bytes > bytes_max
            && let Some(last) = answered.last()
        {
            let api::KeyRead { key, .. } = last;
            rest = Some(range.after(&Key::from(key), backwards));
            break;
        }
        let (key, version) = (key.to_bytes(), Some(version(read.version)));
        answered.push(api::KeyRead { key, value, version });
    }
    let rest = rest.map(|KeyRange { from, until }| api::KeyRange {
        from: from.bytes().to_vec(),
        until: until.map(|until| until.bytes().to_vec()),
    });
    api::ScanResponse { rows: answered, rest, timestamp: timestamp.0 }
}

/// The answers that have a batch of a watch: as many as are needed for its bytes.
pub(super) fn batch(batch: Batch, keys_only: bool, bytes_max: usize) -> Vec<api::WatchResponse> {
    let (mut bytes, mut answers) = (0, vec![api::WatchResponse::default()]);
    for Change { key, version, value } in batch.changes {
        let value = value.map(|value| value.0).filter(|_| !keys_only);
        let more = key.len() + value.as_ref().map_or(0, bytes::Bytes::len) + 64;
        bytes += more;
        if bytes > bytes_max && answers.last().is_some_and(|answer| !answer.changes.is_empty()) {
            answers.push(api::WatchResponse::default());
            bytes = more;
        }
        let (key, version) = (key.to_bytes(), Some(self::version(version)));
        if let Some(answer) = answers.last_mut() {
            answer.changes.push(api::KeyRead { key, value, version });
        }
    }
    if let Some(answer) = answers.last_mut() {
        answer.through = batch.through.0;
    }
    answers
}

/// Converts the failure of a scan, which had no effect.
pub(super) fn scan_failed(failed: &ScanFailed) -> Status {
    let text = failed.to_string();
    match failed {
        ScanFailed::Gateway(error) => refuse(status(error)),
        ScanFailed::Scan(ScanError::Busy | ScanError::Refused(AbortReason::Overload))
        | ScanFailed::Watch(WatchError::Refused(AbortReason::Overload))
        | ScanFailed::Overloaded => refuse(Status::resource_exhausted(text)),
        ScanFailed::Scan(ScanError::Refused(_) | ScanError::NoFence)
        | ScanFailed::Watch(
            WatchError::Future { .. } | WatchError::Refused(_) | WatchError::NoFence,
        ) => refuse(Status::invalid_argument(text)),
        ScanFailed::Watch(WatchError::TooOld { .. }) => refuse(Status::out_of_range(text)),
        ScanFailed::Unsupported => refuse(Status::unimplemented(text)),
        // Another gateway may have room.
        ScanFailed::Late | ScanFailed::Older(_) | ScanFailed::TooManyWatches => {
            refuse(Status::unavailable(text))
        }
    }
}

/// Converts the failure of a call about a lease. The call may be repeated, whatever it was.
pub(super) fn lease_failed(failed: &LeaseError) -> Status {
    let text = failed.to_string();
    match failed {
        LeaseError::Ended(_) => refuse(Status::not_found(text)),
        LeaseError::Ttl => refuse(Status::invalid_argument(text)),
        LeaseError::Clock(_) | LeaseError::NoRandomNumber => refuse(Status::unavailable(text)),
        LeaseError::Gateway(error) if error.is_retryable() => status(error),
        LeaseError::Scan(failed) => scan_failed(failed),
        LeaseError::Refused(_) => refuse(Status::invalid_argument(text)),
        // Without the trailer: the call had an effect, or may have had one. Other errors of the gateway are
        // about its own transaction, and NOT_FOUND would say that the lease has ended.
        LeaseError::Gateway(_) | LeaseError::KeysLeft(_) | LeaseError::Late => {
            Status::unavailable(text)
        }
    }
}

fn version(version: Version) -> api::Version {
    api::Version { timestamp: version.timestamp.0, writer: Some(txn_id(version.writer)) }
}

pub(super) fn txn_id(id: TxnId) -> api::TxnId {
    api::TxnId { client: id.client.0, counter: id.counter, attempt: id.attempt }
}

/// Converts a gateway's error to a status; a trailer marks calls that had no effect.
pub(super) fn status(error: &GatewayError) -> Status {
    let text = error.to_string();
    match error {
        GatewayError::Overloaded { .. } | GatewayError::OverloadedBytes { .. } => {
            refuse(Status::resource_exhausted(text))
        }
        GatewayError::Stopping | GatewayError::Failed(_) => refuse(Status::unavailable(text)),
        GatewayError::UnknownTransaction(_) => refuse(Status::not_found(text)),
        GatewayError::AlreadyBegun(_) | GatewayError::Used(_) => {
            refuse(Status::already_exists(text))
        }
        GatewayError::Unregistered(_) => {
            let mut status = refuse(Status::failed_precondition(text));
            let again = tonic::metadata::MetadataValue::from_static("again");
            status.metadata_mut().insert(REGISTER, again);
            status
        }
        GatewayError::NotUndecided(..) => refuse(Status::failed_precondition(text)),
        // Without the trailer: the call may have had an effect.
        GatewayError::Lost(_) => Status::unavailable(text),
    }
}

/// Converts the reason why a node did not accept an order to a status.
pub(super) fn order_status(about: &Description, error: &OrderError) -> Status {
    let text = format!("{}: {error}", about.node);
    let refusal = match error {
        OrderError::Refused(refusal) => refusal,
        OrderError::NotServing(_) => return refuse(Status::unavailable(text)),
        // Without the trailer: the node may have accepted the order.
        OrderError::Lost => return Status::unavailable(text),
    };
    match refusal {
        Refusal::NotLeader(leader) => {
            let leader = leader.map_or_else(|| "unknown".to_owned(), |leader| leader.0.to_string());
            let mut status = refuse(Status::failed_precondition(text));
            if let Ok(leader) = leader.parse() {
                status.metadata_mut().insert(LEADER, leader);
            }
            status
        }
        Refusal::NotNow(_) => refuse(Status::failed_precondition(text)),
        Refusal::Invalid(_) => refuse(Status::invalid_argument(text)),
        Refusal::Never(_) => refuse(Status::unimplemented(format!("{}: {text}", about.protocol))),
    }
}

/// How the node stands to another one, in the form of the API.
pub(super) fn link(link: &LinkStatus) -> api::Link {
    api::Link {
        node: link.peer.0,
        connected: link.is_connected,
        since_ms: u64::try_from(link.since.as_millis()).unwrap_or(u64::MAX),
        rtt_us: link.rtt_us,
    }
}

pub(super) fn gauge(Gauge { name, node, value }: Gauge) -> api::Gauge {
    api::Gauge { name: name.into(), node: node.0, value }
}

pub(super) fn order((order, age): (MembershipOrder, Duration)) -> api::MembershipOrder {
    let state = match order.state {
        OrderState::Pending(_) => api::membership_order::State::Pending,
        OrderState::Finished => api::membership_order::State::Finished,
        OrderState::Failed(_) | OrderState::NotLeader(_) => api::membership_order::State::Failed,
    };
    let ids = |nodes: Vec<NodeId>| nodes.into_iter().map(|node| node.0).collect();
    api::MembershipOrder {
        partition: order.partition.0,
        detail: order.state.detail(),
        voters: ids(order.voters),
        learners: ids(order.learners),
        state: state.into(),
        age_ms: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
    }
}

pub(super) fn description(
    about: &Description,
    cluster: &Cluster,
    groups: &[GroupView],
) -> api::DescribeResponse {
    let map = &cluster.topology;
    let region = |region| api::Region {
        name: map.name_of(region).into(),
        rtt_us: map
            .regions()
            .map(|other| u64::try_from(map.rtt(region, other).as_micros()).unwrap_or(u64::MAX))
            .collect(),
    };
    let node = |node: &orthodrome_core::cluster::Node| api::Node {
        id: node.id.0,
        region: node.region.0.into(),
        role: match node.role {
            Role::Server => api::NodeRole::Server,
            Role::Gateway => api::NodeRole::Gateway,
        }
        .into(),
    };
    let ids = |nodes: &[NodeId]| nodes.iter().map(|node| node.0).collect::<Vec<_>>();
    let partition = |partition: &orthodrome_core::cluster::Partition| {
        let group = groups.iter().find(|group| group.partition == partition.id);
        api::Partition {
            id: partition.id.0,
            replicas: ids(&partition.replicas),
            preferred_leader: partition.preferred_leader.0,
            voters: group.map(|group| ids(&group.voters)).unwrap_or_default(),
            learners: group.map(|group| ids(&group.learners)).unwrap_or_default(),
            leader: group.and_then(|group| group.leader).map(|leader| leader.0),
        }
    };
    api::DescribeResponse {
        cluster: about.cluster.clone(),
        epoch: cluster.epoch,
        regions: map.regions().map(region).collect(),
        nodes: cluster.nodes().map(node).collect(),
        partitions: cluster.partitions().map(partition).collect(),
        keyspaces: vec![api::Keyspace {
            name: DEFAULT_KEYSPACE.into(),
            protocol: about.protocol.into(),
            guarantee: about.guarantee.into(),
            general: about.general,
        }],
        region: cluster.region_of(about.gateway).0.into(),
        node: about.node.0,
        partitioning: Some(partitioning(cluster.partitioning())),
    }
}

fn partitioning(partitioning: &Partitioning) -> api::Partitioning {
    use api::partitioning::{Hash, Kind, Ranges};
    let kind = match partitioning {
        Partitioning::Hash { .. } => Kind::Hash(Hash {}),
        Partitioning::Range { starts } => {
            let start = |(key, owner): &(orthodrome_core::Key, orthodrome_core::PartitionId)| {
                api::RangeStart { key: key.bytes().to_vec(), partition: owner.0 }
            };
            Kind::Ranges(Ranges { starts: starts.iter().map(start).collect() })
        }
    };
    api::Partitioning { kind: Some(kind) }
}
