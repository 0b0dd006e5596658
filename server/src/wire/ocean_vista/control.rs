//! Who takes part in Ocean Vista: watermarks, the directory and its log, and takeovers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use orthodrome_core::{NodeId, PartitionId, RegionId, Time, Timestamp};
use orthodrome_protocols::ocean_vista::Functor;
use orthodrome_protocols::ocean_vista::directory::{
    self, Answer, Ask, Command, Directory, Grant, Life, Phase, Standing, State, Task,
};
use orthodrome_protocols::ocean_vista::gossiper::{self, Regional};
use orthodrome_protocols::ocean_vista::takeover::{
    self, Bookmark, Closed, Held, Mark, Part, Promise,
};
use orthodrome_protocols::ocean_vista::watermark::{Member, Members, Report, Status, Watermarks};
use orthodrome_protocols::replication::Index;
use prost::Message as _;

use super::super::common::{narrow, need};
use super::super::replication::{
    WireReplicated, message_from_wire, message_to_wire, record_from_wire, record_to_wire,
};
use super::super::{WireError, ocean_vista_schema as wire};
use super::{functor_from_wire, functor_to_wire, keyed, unknown};

// Watermarks.

pub(super) fn partitions_to_wire(
    watermarks: &BTreeMap<PartitionId, Timestamp>,
) -> Vec<wire::PartitionAt> {
    let one = |(partition, at): (&PartitionId, &Timestamp)| wire::PartitionAt {
        partition: partition.0,
        at: at.0,
    };
    watermarks.iter().map(one).collect()
}

pub(super) fn partitions_from_wire(
    watermarks: Vec<wire::PartitionAt>,
) -> Result<BTreeMap<PartitionId, Timestamp>, WireError> {
    let one = |entry: wire::PartitionAt| Ok((PartitionId(entry.partition), Timestamp(entry.at)));
    keyed(watermarks.into_iter().map(one), "watermarks of partitions")
}

/// To the wire.
pub(super) fn gossip_to_wire(msg: &gossiper::Message) -> wire::Gossip {
    use wire::gossip as g;
    let gossip = match msg {
        gossiper::Message::Report(report) => {
            let Report { server, incarnation, epoch, svw, srw, sgw } = report;
            g::Gossip::Report(g::Report {
                server: server.0,
                incarnation: *incarnation,
                epoch: *epoch,
                svw: svw.0,
                srw: partitions_to_wire(srw),
                sgw: sgw.0,
            })
        }
        gossiper::Message::Regional(regional) => {
            let Regional { region, epoch, dvw, drw, dgw } = regional;
            g::Gossip::Regional(g::Regional {
                region: region.0.into(),
                epoch: *epoch,
                dvw: dvw.0,
                drw: partitions_to_wire(drw),
                dgw: dgw.0,
            })
        }
        gossiper::Message::Watermarks(watermarks) => {
            let Watermarks { epoch, visible, replicated, collectable } = watermarks;
            g::Gossip::Watermarks(g::Watermarks {
                epoch: *epoch,
                visible: visible.0,
                replicated: partitions_to_wire(replicated),
                collectable: collectable.0,
            })
        }
    };
    wire::Gossip { gossip: Some(gossip) }
}

/// From the wire.
pub(super) fn gossip_from_wire(msg: wire::Gossip) -> Result<gossiper::Message, WireError> {
    use wire::gossip as g;
    Ok(match need(msg.gossip, "Gossip.gossip")? {
        g::Gossip::Report(report) => gossiper::Message::Report(Report {
            server: NodeId(report.server),
            incarnation: report.incarnation,
            epoch: report.epoch,
            svw: Timestamp(report.svw),
            srw: partitions_from_wire(report.srw)?,
            sgw: Timestamp(report.sgw),
        }),
        g::Gossip::Regional(regional) => gossiper::Message::Regional(Regional {
            region: RegionId(narrow(regional.region, "Regional.region")?),
            epoch: regional.epoch,
            dvw: Timestamp(regional.dvw),
            drw: partitions_from_wire(regional.drw)?,
            dgw: Timestamp(regional.dgw),
        }),
        g::Gossip::Watermarks(watermarks) => gossiper::Message::Watermarks(Watermarks {
            epoch: watermarks.epoch,
            visible: Timestamp(watermarks.visible),
            replicated: partitions_from_wire(watermarks.replicated)?,
            collectable: Timestamp(watermarks.collectable),
        }),
    })
}

// The directory.

fn members_to_wire(members: &Members) -> wire::Members {
    use wire::members as m;
    let Members { epoch, servers } = members;
    let member = |(server, member): (&NodeId, &Member)| {
        let Member { incarnation, status } = *member;
        let status = match status {
            Status::Active => m::member::Status::Active(m::Active {}),
            Status::Fenced { by } => m::member::Status::FencedBy(by.0),
            Status::Out => m::member::Status::Out(m::Out {}),
        };
        m::Member { server: server.0, incarnation, status: Some(status) }
    };
    wire::Members { epoch: *epoch, servers: servers.iter().map(member).collect() }
}

fn members_from_wire(members: wire::Members) -> Result<Members, WireError> {
    use wire::members as m;
    let member = |member: m::Member| {
        let status = match need(member.status, "Member.status")? {
            m::member::Status::Active(_) => Status::Active,
            m::member::Status::FencedBy(by) => Status::Fenced { by: NodeId(by) },
            m::member::Status::Out(_) => Status::Out,
        };
        Ok((NodeId(member.server), Member { incarnation: member.incarnation, status }))
    };
    let servers = keyed(members.servers.into_iter().map(member), "Members.servers")?;
    Ok(Members { epoch: members.epoch, servers })
}

fn task_to_wire(task: &Task) -> wire::Task {
    let Task { server, incarnation, ballot, after, upto } = *task;
    wire::Task { server: server.0, incarnation, ballot, after: after.0, upto: upto.0 }
}

fn task_from_wire(task: wire::Task) -> Task {
    let wire::Task { server, incarnation, ballot, after, upto } = task;
    let (after, upto) = (Timestamp(after), Timestamp(upto));
    Task { server: NodeId(server), incarnation, ballot, after, upto }
}

fn answer_to_wire(answer: &Answer) -> wire::directory_message::Answer {
    let Answer { life, sent, grant, is_over, epoch, members, tasks } = answer;
    let grant = grant.map(|Grant { incarnation, epoch, floor, limit }| {
        wire::directory_message::Grant { incarnation, epoch, floor: floor.0, limit: limit.0 }
    });
    wire::directory_message::Answer {
        life: life.0,
        sent: sent.0,
        grant,
        is_over: *is_over,
        epoch: *epoch,
        members: members.as_ref().map(members_to_wire),
        tasks: tasks.iter().map(task_to_wire).collect(),
    }
}

fn answer_from_wire(answer: wire::directory_message::Answer) -> Result<Answer, WireError> {
    let grant = answer.grant.map(|grant| Grant {
        incarnation: grant.incarnation,
        epoch: grant.epoch,
        floor: Timestamp(grant.floor),
        limit: Timestamp(grant.limit),
    });
    Ok(Answer {
        life: Life(answer.life),
        sent: Time(answer.sent),
        grant,
        is_over: answer.is_over,
        epoch: answer.epoch,
        members: answer.members.map(members_from_wire).transpose()?,
        tasks: answer.tasks.into_iter().map(task_from_wire).collect(),
    })
}

/// To the wire.
pub(super) fn directory_to_wire(msg: &directory::Message) -> wire::DirectoryMessage {
    use wire::directory_message as d;
    let message = match msg {
        directory::Message::Log(msg) => d::Message::Log(message_to_wire(msg)),
        directory::Message::Ask(Ask { life, sent, epoch, clock, done, is_marked }) => {
            d::Message::Ask(d::Ask {
                life: life.0,
                sent: sent.0,
                epoch: *epoch,
                clock: clock.0,
                done: done.iter().map(task_to_wire).collect(),
                is_marked: *is_marked,
            })
        }
        directory::Message::Answer(answer) => d::Message::Answer(answer_to_wire(answer)),
        directory::Message::NotLeader { leader } => {
            d::Message::NotLeader(d::NotLeader { leader: leader.map(|leader| leader.0) })
        }
        directory::Message::Members(members) => d::Message::Members(members_to_wire(members)),
    };
    wire::DirectoryMessage { message: Some(message) }
}

/// From the wire.
pub(super) fn directory_from_wire(
    msg: wire::DirectoryMessage,
) -> Result<directory::Message, WireError> {
    use wire::directory_message as d;
    Ok(match need(msg.message, "DirectoryMessage.message")? {
        d::Message::Log(msg) => directory::Message::Log(message_from_wire(msg)?),
        d::Message::Ask(ask) => directory::Message::Ask(Ask {
            life: Life(ask.life),
            sent: Time(ask.sent),
            epoch: ask.epoch,
            clock: Timestamp(ask.clock),
            done: ask.done.into_iter().map(task_from_wire).collect(),
            is_marked: ask.is_marked,
        }),
        d::Message::Answer(answer) => directory::Message::Answer(answer_from_wire(answer)?),
        d::Message::NotLeader(d::NotLeader { leader }) => {
            directory::Message::NotLeader { leader: leader.map(NodeId) }
        }
        d::Message::Members(members) => directory::Message::Members(members_from_wire(members)?),
    })
}

fn command_to_wire(command: Command) -> wire::DirectoryCommand {
    use wire::directory_command as c;
    let command = match command {
        Command::Join { server, life } => {
            c::Command::Join(c::Join { server: server.0, life: life.0 })
        }
        Command::Fence { server, incarnation, over, by, life } => c::Command::Fence(c::Fence {
            server: server.0,
            incarnation,
            over,
            by: by.0,
            life: life.0,
        }),
        Command::Out { server, incarnation, ballot } => {
            c::Command::Out(c::Out { server: server.0, incarnation, ballot })
        }
        Command::Extend { limit } => c::Command::Extend(limit.0),
    };
    wire::DirectoryCommand { command: Some(command) }
}

fn command_from_wire(command: wire::DirectoryCommand) -> Result<Command, WireError> {
    use wire::directory_command as c;
    Ok(match need(command.command, "DirectoryCommand.command")? {
        c::Command::Join(c::Join { server, life }) => {
            Command::Join { server: NodeId(server), life: Life(life) }
        }
        c::Command::Fence(c::Fence { server, incarnation, over, by, life }) => Command::Fence {
            server: NodeId(server),
            incarnation,
            over,
            by: NodeId(by),
            life: Life(life),
        },
        c::Command::Out(c::Out { server, incarnation, ballot }) => {
            Command::Out { server: NodeId(server), incarnation, ballot }
        }
        c::Command::Extend(limit) => Command::Extend { limit: Timestamp(limit) },
    })
}

fn state_to_wire(state: &State) -> wire::DirectoryState {
    use wire::directory_state as s;
    let State { applied, epoch, limit, servers } = state;
    let standing = |(server, standing): (&NodeId, &Standing)| {
        let Standing { incarnation, life, floor, phase } = *standing;
        let phase = match phase {
            Phase::Active => s::standing::Phase::Active(s::Active {}),
            Phase::Fenced { by, life, ballot, upto } => s::standing::Phase::Fenced(s::Fenced {
                by: by.0,
                life: life.0,
                ballot,
                upto: upto.0,
            }),
            Phase::Out => s::standing::Phase::Out(s::Out {}),
        };
        s::Standing {
            server: server.0,
            incarnation,
            life: life.0,
            floor: floor.0,
            phase: Some(phase),
        }
    };
    wire::DirectoryState {
        applied: applied.0,
        epoch: *epoch,
        limit: limit.0,
        servers: servers.iter().map(standing).collect(),
    }
}

fn state_from_wire(state: wire::DirectoryState) -> Result<State, WireError> {
    use wire::directory_state as s;
    let standing = |standing: s::Standing| {
        let phase = match need(standing.phase, "Standing.phase")? {
            s::standing::Phase::Active(_) => Phase::Active,
            s::standing::Phase::Fenced(s::Fenced { by, life, ballot, upto }) => {
                Phase::Fenced { by: NodeId(by), life: Life(life), ballot, upto: Timestamp(upto) }
            }
            s::standing::Phase::Out(_) => Phase::Out,
        };
        let s::Standing { server, incarnation, life, floor, .. } = standing;
        let (life, floor) = (Life(life), Timestamp(floor));
        Ok((NodeId(server), Standing { incarnation, life, floor, phase }))
    };
    Ok(State {
        applied: Index(state.applied),
        epoch: state.epoch,
        limit: Timestamp(state.limit),
        servers: keyed(state.servers.into_iter().map(standing), "DirectoryState.servers")?,
    })
}

impl WireReplicated for Directory {
    fn encode_command(command: &Command) -> Bytes {
        command_to_wire(*command).encode_to_vec().into()
    }

    fn decode_command(bytes: Bytes) -> Result<Command, WireError> {
        command_from_wire(wire::DirectoryCommand::decode(bytes)?)
    }

    fn encode_chunk(state: &State) -> Bytes {
        state_to_wire(state).encode_to_vec().into()
    }

    fn decode_chunk(bytes: Bytes) -> Result<State, WireError> {
        state_from_wire(wire::DirectoryState::decode(bytes)?)
    }
}

/// To the wire.
pub(super) fn directory_record_to_wire(record: &directory::Record) -> wire::DirectoryRecord {
    use wire::directory_record::Record as Wire;
    let record = match record {
        directory::Record::State(state) => Wire::State(state_to_wire(state)),
        directory::Record::Log(record) => Wire::Log(record_to_wire(record)),
    };
    wire::DirectoryRecord { record: Some(record) }
}

/// From the wire.
pub(super) fn directory_record_from_wire(
    record: wire::DirectoryRecord,
) -> Result<directory::Record, WireError> {
    use wire::directory_record::Record as Wire;
    Ok(match need(record.record, "DirectoryRecord.record")? {
        Wire::State(state) => directory::Record::State(state_from_wire(state)?),
        Wire::Log(record) => directory::Record::Log(record_from_wire(record)?),
    })
}

// Takeovers.

fn closed_to_wire(closed: &Closed) -> wire::Closed {
    let Closed { ballot, above, upto, survivors } = closed;
    let survivors = survivors.iter().map(|ts| ts.0).collect();
    wire::Closed { ballot: *ballot, above: above.0, upto: upto.0, survivors }
}

fn closed_from_wire(closed: wire::Closed) -> Result<Closed, WireError> {
    let wire::Closed { ballot, above, upto, survivors } = closed;
    if !survivors.is_sorted_by(|a, b| a < b) {
        let (field, found) = ("Closed.survivors", "timestamps out of order".into());
        return Err(WireError::Value { field, found, wanted: "sorted timestamps, each once" });
    }
    let survivors: BTreeSet<Timestamp> = survivors.into_iter().map(Timestamp).collect();
    Ok(Closed { ballot, above: Timestamp(above), upto: Timestamp(upto), survivors })
}

fn mark_to_wire(mark: Mark) -> i32 {
    let mark = match mark {
        Mark::Tentative => wire::Mark::Tentative,
        Mark::Finalized => wire::Mark::Finalized,
        Mark::Aborted => wire::Mark::Aborted,
    };
    mark as i32
}

fn mark_from_wire(mark: i32) -> Result<Mark, WireError> {
    Ok(match wire::Mark::try_from(mark) {
        Ok(wire::Mark::Tentative) => Mark::Tentative,
        Ok(wire::Mark::Finalized) => Mark::Finalized,
        Ok(wire::Mark::Aborted) => Mark::Aborted,
        Ok(wire::Mark::Unspecified) | Err(_) => return Err(unknown("Mark", mark)),
    })
}

fn promise_to_wire(
    part: &Part,
    promise: &Promise<Arc<Functor>>,
) -> wire::takeover_message::Promised {
    let Promise { visible, closed, held } = promise;
    let one = |(ts, held): (&Timestamp, &Held<Arc<Functor>>)| {
        let Held { ballot, mark, functor } = held;
        wire::Held {
            ts: ts.0,
            ballot: *ballot,
            mark: mark_to_wire(*mark),
            functor: functor.as_ref().map(|functor| functor_to_wire(functor)),
        }
    };
    wire::takeover_message::Promised {
        visible: visible.0,
        closed: closed.as_ref().map(closed_to_wire),
        held: held.iter().map(one).collect(),
        moment: part.moment,
        from: part.from.0,
        next: part.next.map(|next| next.0),
    }
}

fn promise_from_wire(
    promise: wire::takeover_message::Promised,
) -> Result<(Part, Promise<Arc<Functor>>), WireError> {
    let one = |held: wire::Held| {
        let functor = held.functor.map(|functor| functor_from_wire(Some(functor))).transpose()?;
        let (ballot, mark) = (held.ballot, mark_from_wire(held.mark)?);
        Ok((Timestamp(held.ts), Held { ballot, mark, functor }))
    };
    let part = Part {
        moment: promise.moment,
        from: Timestamp(promise.from),
        next: promise.next.map(Timestamp),
    };
    let promise = Promise {
        visible: Timestamp(promise.visible),
        closed: promise.closed.map(closed_from_wire).transpose()?,
        held: keyed(promise.held.into_iter().map(one), "Promised.held")?,
    };
    Ok((part, promise))
}

/// To the wire.
pub(super) fn takeover_to_wire(msg: &takeover::Message<Arc<Functor>>) -> wire::TakeoverMessage {
    use wire::takeover_message as t;
    let (partition, task, message) = match msg {
        takeover::Message::Promise { partition, task, after } => {
            let after = after.map(|Bookmark { moment, next }| t::Bookmark { moment, next: next.0 });
            (partition, task, t::Message::Promise(t::Promise { after }))
        }
        takeover::Message::Promised { partition, task, part, promise } => {
            (partition, task, t::Message::Promised(promise_to_wire(part, promise)))
        }
        takeover::Message::Close { partition, task, closed } => {
            (partition, task, t::Message::Close(closed_to_wire(closed)))
        }
        takeover::Message::Closed { partition, task } => {
            (partition, task, t::Message::Closed(t::Done {}))
        }
    };
    let (partition, task) = (partition.0, Some(task_to_wire(task)));
    wire::TakeoverMessage { partition, task, message: Some(message) }
}

/// From the wire.
pub(super) fn takeover_from_wire(
    msg: wire::TakeoverMessage,
) -> Result<takeover::Message<Arc<Functor>>, WireError> {
    use wire::takeover_message as t;
    let partition = PartitionId(msg.partition);
    let task = task_from_wire(need(msg.task, "TakeoverMessage.task")?);
    Ok(match need(msg.message, "TakeoverMessage.message")? {
        t::Message::Promise(t::Promise { after }) => {
            let of =
                |after: t::Bookmark| Bookmark { moment: after.moment, next: Timestamp(after.next) };
            takeover::Message::Promise { partition, task, after: after.map(of) }
        }
        t::Message::Promised(promise) => {
            let (part, promise) = promise_from_wire(promise)?;
            takeover::Message::Promised { partition, task, part, promise }
        }
        t::Message::Close(closed) => {
            takeover::Message::Close { partition, task, closed: closed_from_wire(closed)? }
        }
        t::Message::Closed(_) => takeover::Message::Closed { partition, task },
    })
}

/// To the wire.
pub(super) fn takeover_record_to_wire(
    partition: PartitionId,
    record: &takeover::Record,
) -> wire::TakeoverRecord {
    use wire::takeover_record as t;
    let record = match record {
        takeover::Record::Pledge { server, incarnation, ballot } => {
            let (server, incarnation, ballot) = (server.0, *incarnation, *ballot);
            t::Record::Pledge(t::Pledge { server, incarnation, ballot })
        }
        takeover::Record::Closed { server, incarnation, closed } => {
            let closed = Some(closed_to_wire(closed));
            t::Record::Closed(t::Closed { server: server.0, incarnation: *incarnation, closed })
        }
        takeover::Record::Swept { server, incarnation } => {
            t::Record::Swept(t::Swept { server: server.0, incarnation: *incarnation })
        }
    };
    wire::TakeoverRecord { partition: partition.0, record: Some(record) }
}

/// From the wire.
pub(super) fn takeover_record_from_wire(
    record: wire::TakeoverRecord,
) -> Result<(PartitionId, takeover::Record), WireError> {
    use wire::takeover_record as t;
    let partition = PartitionId(record.partition);
    let record = match need(record.record, "TakeoverRecord.record")? {
        t::Record::Pledge(t::Pledge { server, incarnation, ballot }) => {
            takeover::Record::Pledge { server: NodeId(server), incarnation, ballot }
        }
        t::Record::Closed(t::Closed { server, incarnation, closed }) => {
            let closed = closed_from_wire(need(closed, "TakeoverRecord.closed")?)?;
            takeover::Record::Closed { server: NodeId(server), incarnation, closed }
        }
        t::Record::Swept(t::Swept { server, incarnation }) => {
            takeover::Record::Swept { server: NodeId(server), incarnation }
        }
    };
    Ok((partition, record))
}
