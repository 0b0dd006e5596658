//! What protocols that commit in two phases over replicated groups have in common.
//!
//! A partition's group plays two roles, and one log serves both. As *participant* it prepares a
//! transaction, votes, and carries out the decision. As *coordinator* it collects the votes,
//! decides, and tells everybody. Each protocol says the rest in its own folder: when a
//! partition prepares, what a vote says, and when votes decide.
//!
//! | module | what it has | who uses it |
//! |---|---|---|
//! | `state` | what every replica of a group knows: prepared, ended, coordinated and settled transactions | Carousel, Natto, two-phase locking |

mod state;

pub use state::{Applied, Coordinated, Ended, Part, Request, State};
