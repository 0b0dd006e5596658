//! Descriptions of clusters and gateways, as text and tables.

use std::fmt::Write as _;
use std::time::Duration;

use comfy_table::{CellAlignment, Table};
use orthodrome_client::{
    ClusterInfo, Error, LeaseInfo, MembershipOrder, NodeInfo, OrderState, PartitionInfo, StatusInfo,
};
use orthodrome_core::NodeId;

use super::words::quote;
use crate::output;
use crate::style::Style;

fn region_name(about: &ClusterInfo, index: usize) -> &str {
    about.regions.get(index).map_or("?", |region| region.name.as_str())
}

fn here(about: &ClusterInfo) -> &str {
    region_name(about, usize::from(about.region.0))
}

/// The greeting of a shell.
pub(super) fn welcome(about: &ClusterInfo) -> String {
    let keyspace = about.keyspaces.first();
    let (protocol, guarantee) =
        keyspace.map_or(("?", "?"), |space| (space.protocol.as_str(), space.guarantee.as_str()));
    format!(
        "Cluster {:?}: {} regions, {} partitions, {protocol} ({guarantee}). The gateway is in {}.\n\
         `help` lists the commands.",
        about.cluster,
        about.regions.len(),
        about.partitions.len(),
        here(about)
    )
}

/// The cluster's description of itself.
pub(super) fn cluster(about: &ClusterInfo, style: Style) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "cluster    {} (map epoch {})", about.cluster, about.epoch);
    let _ = writeln!(text, "gateway    in {}", here(about));
    for space in &about.keyspaces {
        let general =
            if space.general { "general transactions" } else { "no general transactions" };
        let _ = writeln!(
            text,
            "keyspace   {}: {}, {}, {general}",
            space.name, space.protocol, space.guarantee
        );
    }
    let _ = writeln!(text, "\n{}", style.bold("round-trip times, ms"));
    let _ = writeln!(text, "{}", distances(about));
    let _ = writeln!(text, "\n{}", style.bold("partitions"));
    let _ = writeln!(text, "{}", placement(about));
    text
}

fn distances(about: &ClusterInfo) -> Table {
    let names = about.regions.iter().map(|region| region.name.as_str());
    let header: Vec<&str> = std::iter::once("").chain(names).collect();
    let rows = about.regions.iter().map(|region| {
        let cells = region.rtt.iter().map(|rtt| millis(*rtt));
        std::iter::once(region.name.clone()).chain(cells).collect::<Vec<_>>()
    });
    output::table(&header, rows)
}

fn placement(about: &ClusterInfo) -> Table {
    let place = |id| {
        let node = about.nodes.iter().find(|node: &&NodeInfo| node.id == id);
        let region = node.map_or("?", |node| region_name(about, usize::from(node.region.0)));
        format!("{id} {region}")
    };
    let places = |ids: &[NodeId]| ids.iter().map(|id| place(*id)).collect::<Vec<_>>().join(", ");
    let has_learners = about.partitions.iter().any(|partition| !partition.learners.is_empty());
    // Not every protocol has leaders.
    let has_leaders = about.partitions.iter().any(|partition| partition.leader.is_some());
    let rows = about.partitions.iter().map(|partition| {
        let PartitionInfo { id, placed, voters, learners, leader } = partition;
        let preferred = placed.first().map(|id| place(*id)).unwrap_or_default();
        let members = if voters.is_empty() { placed } else { voters };
        let mut row = vec![id.to_string()];
        row.extend(has_leaders.then(|| leader.map(place).unwrap_or_default()));
        row.extend([preferred, places(members)]);
        row.extend(has_learners.then(|| places(learners)));
        row
    });
    let mut header = vec!["partition"];
    header.extend(has_leaders.then_some("leader"));
    header.extend(["preferred leader", "members"]);
    header.extend(has_learners.then_some("learners"));
    let mut table = output::table(&header, rows);
    for column in table.column_iter_mut() {
        column.set_cell_alignment(CellAlignment::Left);
    }
    table
}

/// How long a lease lives, and its keys, one on a line.
pub(super) fn lease(lease: &LeaseInfo) -> String {
    let mut text = format!("ends in {:.1} s", lease.left.as_secs_f64());
    for key in &lease.keys {
        // Writing to a string cannot fail.
        let _ = write!(text, "\n{}", quote(key.bytes()));
    }
    if lease.has_more {
        text.push_str("\n-- and more keys");
    }
    text
}

fn millis(rtt: Duration) -> String {
    let millis = rtt.as_secs_f64() * 1_000.0;
    if millis.fract() == 0.0 { format!("{millis:.0}") } else { format!("{millis:.1}") }
}

/// The status of a gateway.
pub(super) fn status(status: &StatusInfo) -> String {
    let trouble = if status.trouble.is_empty() { "serving".into() } else { status.trouble.clone() };
    let row = |name: &str, value: String| (name.to_owned(), value);
    let gauges = status.gauges.iter().map(|gauge| {
        row(&format!("{} {}", gauge.node, gauge.name.replace('_', " ")), gauge.value.to_string())
    });
    let rows = [
        row("node", status.node.to_string()),
        row("state", trouble),
        row("version", status.version.clone()),
        row("up for", output::span(status.uptime)),
        row("pending requests", format!("{} of {}", status.requests, status.requests_max)),
        row(
            "pending transactions",
            format!("{} of {}", status.txns_in_flight, status.txns_in_flight_max),
        ),
        row("open interactive", format!("{} of {}", status.txns_open, status.txns_open_max)),
        row(
            "outcomes so far",
            format!(
                "{} committed, {} aborted, {} unknown",
                status.committed, status.aborted, status.unknown
            ),
        ),
        row("refused (overload)", status.refused.to_string()),
        row("expired leases", status.leases_expired.to_string()),
        row("demoted (quota)", status.demoted.to_string()),
    ];
    let orders = status.orders.iter().map(|order| row("member change", describe_order(order)));
    let links = status.links.iter().map(|link| {
        let state = if link.is_connected { "connected" } else { "not connected" };
        let rtt = link.rtt.filter(|_| link.is_connected);
        let rtt = rtt.map(|rtt| format!(", round trip {:.3} ms", rtt.as_secs_f64() * 1e3));
        let time = output::span(link.since);
        row(&format!("{} is", link.node), format!("{state} for {time}{}", rtt.unwrap_or_default()))
    });
    let rows: Vec<_> = rows.into_iter().chain(links).chain(gauges).chain(orders).collect();
    // At least as wide as without gauges, so that the columns of two nodes are usually alike.
    let width = rows.iter().map(|(name, _)| name.chars().count() + 2).fold(22, usize::max);
    rows.iter().map(|(name, value)| format!("{name:<width$}{value}\n")).collect()
}

/// The orders that each node took, and their states.
pub(super) fn orders(statuses: &[(String, Result<StatusInfo, Error>)]) -> String {
    let mut text = String::new();
    for (endpoint, status) in statuses {
        // Writing to a string cannot fail.
        match status {
            Ok(status) => {
                for order in &status.orders {
                    let _ =
                        writeln!(text, "{:<6}{}", status.node.to_string(), describe_order(order));
                }
            }
            Err(error) => {
                let _ = writeln!(text, "{endpoint} does not say which orders it took: {error}");
            }
        }
    }
    if text.is_empty() { "no node has taken an order since it started".into() } else { text }
}

/// One order to change members: `p0: voters n1 n2 n4: finished, given 12 s ago`.
fn describe_order(order: &MembershipOrder) -> String {
    let names = |ids: &[NodeId]| {
        let names: Vec<String> = ids.iter().map(NodeId::to_string).collect();
        names.join(" ")
    };
    let state = match order.state {
        OrderState::Pending => "pending",
        OrderState::Finished => "finished",
        OrderState::Failed => "failed",
        OrderState::Unknown => "unknown to this version",
    };
    let mut text = format!("{}: voters {}", order.partition, names(&order.voters));
    if !order.learners.is_empty() {
        text.push_str(&format!(", learners {}", names(&order.learners)));
    }
    text.push_str(&format!(": {state}, requested {:.0} s ago", order.age.as_secs_f64()));
    if !order.detail.is_empty() {
        text.push_str(&format!("; {}", order.detail));
    }
    text
}
