//! The page, in parts that are updated separately.

use std::time::Duration;

use maud::{DOCTYPE, Markup, html};
use orthodrome_core::machine::{Gauge, GroupView, MembershipOrder, OrderState};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::{Cluster, NodeId, RegionId};
use tokio::time::Instant;

use super::regions::{RegionMap, RegionState, Rtt, matrix};
use super::{live, text};
use crate::gateway::{Description, Health, PendingTxns};
use crate::service::live::{Seen, WINDOW};
use crate::transport::LinkStatus;

/// Rows of a table whose length depends on the cluster.
const ROWS_MAX: usize = 200;

/// What the page shows.
pub(super) struct Facts<'a> {
    pub(super) about: Description,
    pub(super) cluster: &'a Cluster,
    pub(super) map: Option<&'a RegionMap>,
    pub(super) uptime: Duration,
    /// Requests in flight, and their bound.
    pub(super) requests: [usize; 2],
    pub(super) links: Vec<LinkStatus>,
    pub(super) gauges: Vec<Gauge>,
    pub(super) groups: Vec<GroupView>,
    pub(super) orders: Vec<(MembershipOrder, Duration)>,
    pub(super) pending: Option<PendingTxns>,
    pub(super) live: Seen,
    pub(super) now: Instant,
}

/// The content of the element with this id.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) id: &'static str,
    pub(super) html: String,
}

/// Id, title and explanation of each part. The first has no title.
const PARTS: [(&str, &str, &str); 12] = [
    ("node", "", ""),
    ("now", "Transactions now", "of the gateway of this node, over the last seconds"),
    ("charts", "", ""),
    ("regions", "Regions", "distances are roughly proportional to round trips"),
    ("round-trips", "Round trips", "measured by this node, in grey as the topology says"),
    ("nodes", "Nodes", "as this node sees them"),
    ("partitions", "Partitions", "as this node knows them; the leader knows who is behind"),
    ("keys", "Hot keys", "of a sample of the gateway's transactions"),
    ("aborts", "Aborts", ""),
    ("pending", "In flight", "the oldest first"),
    ("slow", "Slow transactions", "the slowest of the last one to two minutes"),
    ("recent", "Recent transactions", "one of each second"),
];

/// The parts that are shown only to operators who look for them, at the end of the page.
const MORE: [(&str, &str, &str); 2] = [
    ("orders", "Orders of operators", "to change members, as this node knows them"),
    ("gauges", "Protocol", "quantities of the protocol at this node"),
];

/// Every part, as it is now.
pub(super) fn parts(facts: &Facts<'_>) -> Vec<Part> {
    let seconds = &facts.live.seconds;
    let parts = [
        ("node", node(facts)),
        ("now", live::now(seconds)),
        ("charts", live::charts(seconds)),
        ("regions", regions(facts)),
        ("round-trips", matrix(facts.cluster, facts.here(), |a, b| facts.rtt(a, b))),
        ("nodes", nodes(facts)),
        ("partitions", partitions(facts)),
        ("keys", live::keys(&facts.live.keys, facts.cluster)),
        ("aborts", live::aborts(seconds)),
        ("pending", live::pending(facts.pending.as_ref())),
        ("slow", live::journeys(&facts.live.slow, facts.now)),
        ("recent", live::journeys(&facts.live.recent, facts.now)),
        ("orders", orders(facts)),
        ("gauges", gauges(facts)),
    ];
    parts.into_iter().map(|(id, html)| Part { id, html: html.into_string() }).collect()
}

fn document(title: &str, has_script: bool, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width";
                title { (title) }
                link rel="icon" href="/console/icon.svg";
                link rel="stylesheet" href="/console/console.css";
                @if has_script { script defer src="/console/console.js" {} }
            }
            body { (body) }
        }
    };
    page.into_string()
}

/// The page. `has_login`: the viewer may have logged in with a token.
pub(super) fn page(about: &Description, parts: &[Part], has_login: bool) -> String {
    let content = |id: &str| {
        let part = parts.iter().find(|part| part.id == id);
        html! { div id=(id) { @if let Some(part) = part { (maud::PreEscaped(&part.html)) } } }
    };
    let section = |(id, title, about): (&str, &str, &str)| {
        html! {
            section class=(id) {
                @if !title.is_empty() {
                    h2 { (title) @if !about.is_empty() { " " small { (about) } } }
                }
                (content(id))
            }
        }
    };
    let body = html! {
        header {
            h1 { "Orthodrome " span class="soft" { (about.cluster) } }
            div class="state" {
                span id="live" class="soft" role="status" { "reload the page for new numbers" }
                @if has_login {
                    form method="post" action="/console/logout" { button { "Log out" } }
                }
            }
        }
        main {
            @for part in PARTS { (section(part)) }
            p class="legend" {
                "Journeys: "
                span class="s0" { i {} "reads" }
                span class="s1" { i {} "client decides" }
                span class="s2" { i {} "to the outcome" }
            }
            @for part in MORE { (section(part)) }
        }
    };
    document(&format!("{} · {}", about.node, about.cluster), true, &body)
}

/// The form for a token, and why the last one did not do.
pub(super) fn login(why: Option<&str>) -> String {
    let body = html! {
        main class="login" {
            h1 { "Orthodrome" }
            form method="post" action="/console/login" {
                label for="token" { "Token of a principal with the role " code { "read" } }
                input id="token" name="token" type="password" autocomplete="current-password"
                    maxlength="256" required autofocus;
                button { "Log in" }
                @if let Some(why) = why { p class="bad" role="alert" { (why) } }
            }
        }
    };
    document("Orthodrome", false, &body)
}

impl Facts<'_> {
    /// The region of this node.
    fn here(&self) -> RegionId {
        self.cluster.region_of(self.about.gateway)
    }

    fn link(&self, node: NodeId) -> Option<&LinkStatus> {
        self.links.iter().find(|link| link.peer == node)
    }

    fn is_up(&self, node: NodeId) -> bool {
        node == self.about.node || self.link(node).is_some_and(|link| link.is_connected)
    }

    fn rtt(&self, a: RegionId, b: RegionId) -> Rtt {
        rtt(self.cluster, &self.links, self.here(), a, b)
    }
}

/// The round trip between two regions: the shortest that a node in `here` has measured on its links,
/// with emulated delays; or that of the topology.
pub(super) fn rtt(
    cluster: &Cluster,
    links: &[LinkStatus],
    here: RegionId,
    a: RegionId,
    b: RegionId,
) -> Rtt {
    let other = if a == here { b } else { a };
    let is_there = |link: &&LinkStatus| cluster.region_of(link.peer) == other;
    let measured = links.iter().filter(is_there).filter_map(round_trip_ms);
    match measured.reduce(f64::min).filter(|_| a == here || b == here) {
        Some(ms) => Rtt { ms, is_measured: true },
        None => Rtt { ms: cluster.topology.rtt(a, b).as_secs_f64() * 1e3, is_measured: false },
    }
}

/// The round trip to a node that answered a ping, with emulated delays.
fn round_trip_ms(link: &LinkStatus) -> Option<f64> {
    let is_known = link.is_connected && link.rtt_us > 0;
    let ms = link.rtt_us as f64 / 1e3 + 2.0 * link.delay.as_secs_f64() * 1e3;
    is_known.then_some(ms)
}

fn node(facts: &Facts<'_>) -> Markup {
    let about = &facts.about;
    let [requests, requests_max] = facts.requests;
    html! {
        dl class="facts" {
            div { dt { "Node" } dd { (about.node) " in " (about.region) } }
            div { dt { "Gateway" } dd { (about.gateway) } }
            div { dt { "State" } dd {
                @match &about.health {
                    Health::Serving => span class="good" { "serving" },
                    Health::Stopping => span class="noted" { "stopping" },
                    Health::Failed(why) => span class="bad" { "failed: " (why) },
                }
            } }
            div { dt { "Since" } dd { (text::age(facts.uptime)) } }
            div { dt { "Protocol" } dd { (about.protocol) } }
            div { dt { "Guarantee" } dd { (about.guarantee) } }
            div { dt { "Version" } dd { (env!("CARGO_PKG_VERSION")) } }
            div { dt { "In flight" } dd { (about.in_flight) " of " (about.in_flight_max) } }
            div { dt { "Requests" } dd { (requests) " of " (requests_max) } }
            div { dt { "Numbers are of" } dd { "the last " (WINDOW) " s" } }
        }
    }
}

fn regions(facts: &Facts<'_>) -> Markup {
    let mut states: OrdMap<RegionId, RegionState> = OrdMap::new();
    for node in facts.cluster.servers() {
        let state = states.entry(node.region).or_default();
        state.nodes += 1;
        state.up += usize::from(facts.is_up(node.id));
    }
    html! {
        @match facts.map {
            Some(map) => div class="wide" {
                (map.draw(facts.cluster, facts.here(), &states, |a, b| facts.rtt(a, b)))
            },
            None => p class="soft" { "There are too many regions for a drawing." },
        }
    }
}

/// Says that a table does not show all rows.
fn rest(total: usize) -> Markup {
    html! {
        @if total > ROWS_MAX { p class="soft" { "… and " (total - ROWS_MAX) " more" } }
    }
}

fn nodes(facts: &Facts<'_>) -> Markup {
    let cluster = facts.cluster;
    let mut servers: Vec<_> = cluster.servers().collect();
    servers.sort_by_key(|node| (node.region, node.id));
    let row = |node: NodeId, region: RegionId| {
        let link = facts.link(node);
        let is_here = node == facts.about.node;
        let since = if is_here { Some(facts.uptime) } else { link.map(|link| link.since) };
        html! { tr {
            td { (cluster.topology.name_of(region)) }
            td { (node) }
            td { @match (is_here, facts.is_up(node)) {
                (true, _) => span class="good" { "this node" },
                (false, true) => span class="good" { "up" },
                (false, false) => span class="bad" { "down" },
            } }
            td class="n" { @if let Some(since) = since { (text::age(since)) } }
            td class="n" { @if let Some(ms) = link.and_then(round_trip_ms) { (text::number(ms)) " ms" } }
            td class="n" { @if let Some(link) = link { (text::bytes(link.queued_bytes)) } }
            td class="n" { @if let Some(link) = link { (link.lost) } }
        } }
    };
    html! {
        div class="wide" { table {
            thead { tr {
                th { "Region" } th { "Node" } th { "State" } th class="n" { "since" }
                th class="n" { "Round trip" } th class="n" { "Queued" } th class="n" { "Dropped" }
            } }
            tbody { @for node in servers.iter().take(ROWS_MAX) { (row(node.id, node.region)) } }
        } }
        (rest(servers.len()))
    }
}

fn partitions(facts: &Facts<'_>) -> Markup {
    let cluster = facts.cluster;
    let names =
        |nodes: &[NodeId]| nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let behind = |group: &GroupView| {
        let all = group.behind.iter().filter(|(_, entries)| *entries > 0);
        let all = all.map(|(node, entries)| format!("{node}: {entries}")).collect::<Vec<_>>();
        match (all.is_empty(), group.behind.is_empty()) {
            (false, _) => all.join(", "),
            (true, false) => "nobody".into(),
            (true, true) => "–".into(),
        }
    };
    let row = |placed: &orthodrome_core::cluster::Partition| {
        let group = facts.groups.iter().find(|group| group.partition == placed.id);
        let voters = group.map_or(&placed.replicas, |group| &group.voters);
        html! { tr {
            td { (placed.id) }
            @match group.and_then(|group| group.leader) {
                Some(leader) => td class="pair" {
                    (leader) " "
                    span class="soft" { (cluster.topology.name_of(cluster.region_of(leader))) }
                },
                None if group.is_some_and(|group| group.has_leaders) => {
                    td class="bad" { "none known" }
                }
                None if group.is_some() => td class="soft" { "–" },
                None => td class="soft" { "not a member" },
            }
            td { (names(voters)) }
            td { @if let Some(group) = group { (names(&group.learners)) } }
            td { @if let Some(group) = group { (behind(group)) } @else { "–" } }
        } }
    };
    let total = cluster.partitions().count();
    html! {
        div class="wide" { table {
            thead { tr {
                th { "Partition" } th { "Leader" } th { "Voters" } th { "Learners" }
                th { "Entries behind" }
            } }
            tbody { @for placed in cluster.partitions().take(ROWS_MAX) { (row(placed)) } }
        } }
        (rest(total))
    }
}

fn orders(facts: &Facts<'_>) -> Markup {
    let state = |order: &MembershipOrder| match &order.state {
        OrderState::Pending(_) => ("noted", "pending"),
        OrderState::Finished => ("good", "finished"),
        OrderState::Failed(_) | OrderState::NotLeader(_) => ("bad", "failed"),
    };
    let names =
        |nodes: &[NodeId]| nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    html! {
        @if facts.orders.is_empty() {
            p class="soft" { "This node has received no orders since it started." }
        } @else {
            div class="wide" { table {
                thead { tr {
                    th { "Partition" } th { "Voters" } th { "Learners" } th { "State" }
                    th { "Detail" } th class="n" { "Given" }
                } }
                tbody { @for (order, age) in facts.orders.iter().take(ROWS_MAX) {
                    @let (class, name) = state(order);
                    tr {
                        td { (order.partition) }
                        td { (names(&order.voters)) }
                        td { (names(&order.learners)) }
                        td class=(class) { (name) }
                        td { (order.state.detail()) }
                        td class="n" { (text::age(*age)) " ago" }
                    }
                } }
            } }
            (rest(facts.orders.len()))
        }
    }
}

fn gauges(facts: &Facts<'_>) -> Markup {
    html! {
        @if facts.gauges.is_empty() {
            p class="soft" { "This protocol has no quantities to show." }
        } @else {
            div class="wide" { table {
                thead { tr { th { "Quantity" } th { "of" } th class="n" { "Value" } } }
                tbody { @for gauge in facts.gauges.iter().take(ROWS_MAX) {
                    tr {
                        td { (gauge.name) }
                        td { (gauge.node) }
                        td class="n" { (gauge.value) }
                    }
                } }
            } }
            (rest(facts.gauges.len()))
        }
    }
}
