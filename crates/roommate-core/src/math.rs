//! Numerical helpers. Nothing here knows about jobs or GPUs.
//!
//! ```text
//!  a policy's question                     what answers it
//!  which jobs share a GPU                  matching, assignment
//!  how to divide resources among jobs      lp, conic, choice
//!  how does a curve continue               piecewise, least_squares, pool ← boost, forest
//!  what to measure next                    bayes_search ← gp
//!  how long do requests wait               queueing
//!  draws, summaries and names              rng, stat, hash
//! ```
//!
//! Invariants: the same input gives the same bits on every machine and after every upgrade, because
//! a journal must replay; no answer depends on a clock; each method is tested against a slow twin
//! or a law.

pub mod assignment;
pub mod bayes_search;
pub mod boost;
pub mod choice;
pub mod forest;
pub mod gp;
pub mod hash;
pub mod least_squares;
pub mod lp;
/// General matching. `matching/released.rs` repeats the published Muri artifact, whose ties and
/// tolerance decide its figures; [`matching::Exact`] is the clean search.
pub mod matching;
pub mod piecewise;
pub mod pool;
pub mod queueing;
pub mod rng;
pub mod stat;

// What follows is written as it is so that published studies can be repeated. Where many answers
// are best, their solver decides which one is found, and their generator decides what is drawn;
// another one would be as right and give other figures than those that are compared.

/// The interior-point method of ECOS, which the Gavel study used. Policies outside compat modes use
/// it for its speed: a step is linear in the number of jobs.
pub mod conic;
/// Python's random generator, from which the Gavel study draws; only compat modes use it.
pub mod twister;
