//! What protocols that commit in two phases over replicated groups have in common.
//!
//! A partition's group plays two roles, and one log serves both. As *participant* it prepares a
//! transaction, votes, and carries out the decision. As *coordinator* it collects the votes,
//! decides, and announces the outcome. Each protocol says the rest in its own folder: when a
//! partition prepares, what a vote says, and when votes decide.
//!
//! Source: Carousel (SIGMOD 2018) §4.1–4.4. Codes such as C12 and R6 are defined in
//! `docs/pitfalls.md`, and F1 to F12 in `docs/reliability.md`. Decision: ADR 34
//! (`docs/adr/0034-carousel-and-natto-commit-through-one-core.md`).
//!
//! | module | what it has | who uses it |
//! |---|---|---|
//! | `state` | what every replica of a group knows: prepared, ended, coordinated and settled transactions | Carousel, Natto, two-phase locking |
//! | `votes` | the coordinator before the decision: participants, commit requests, votes, aborts, takeover | Carousel, Natto |
//! | `coordinator` | the coordinator after the decision: commit-wait, announcements, acknowledgements, settling | Carousel, Natto, two-phase locking |
//! | `participant` | the participant's votes and memory: queries, acknowledgements, endings to forget | Carousel, Natto |
//! | `reading` | read-only transactions that wait for writers, leadership checks and the ceiling | Natto, two-phase locking |
//! | `timeouts` | how long each of them waits | Carousel, Natto, two-phase locking |
//! | `message` | messages between coordinators and participants, one enum for each direction | Carousel, Natto |
//! | `items` | parts of implementations that are the same word for word | Carousel, Natto, two-phase locking |
//! | `gateway` | the gateway's loop: open transactions, resends, suspicion, heartbeats, resolving, read-only snapshots | Carousel, Natto, two-phase locking |
//!
//! A protocol implements `Gateway` and `Coordinator`; `Gathering` if its participants vote without
//! being asked; `Reader` if readers wait for writers. The traits build its messages and commands.
//! The traits also have hooks for what only one protocol does. In two-phase locking the coordinator
//! asks for votes and logs nothing before the decision, so it decides with its own code.
//!
//! Handlers of leaders are methods of `hosting::Leading`: where no replica leads, they cannot be
//! called.

mod coordinator;
mod gateway;
mod items;
mod message;
mod participant;
mod reading;
mod state;
mod timeouts;
mod votes;

pub(crate) use coordinator::{Coordinating, Coordination, Coordinator, Note, Outcomes, Timer};
pub use gateway::Client;
pub(crate) use gateway::{Gateway, Open, Phase};
pub(crate) use items::{
    coordinator_items, core_events, core_messages, gateway_items, gathering_items, role_items,
};
pub(crate) use message::{ToCoordinator, ToParticipant};
pub(crate) use participant::Participation;
pub(crate) use reading::{Reader, Reading, WaitingRead, has_fence, valid_at_least};
pub use state::{Applied, Coordinated, Ended, Part, Request, State, Verdict};
pub use timeouts::Timeouts;
pub(crate) use votes::Gathering;
