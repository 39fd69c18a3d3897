//! Maximum-weight matching in general graphs: which pairs to form.
//!
//! Three matchers, one search:
//!
//! - [`Matcher`] repeats the published Muri artifact digit by digit, oddities included;
//! - [`Exact`] is the same search made clean: symmetric weights, integer arithmetic, no tolerance,
//!   and an answer that is always mutual and always maximal;
//! - [`ClassMatcher`] is for thousands of vertices of a few classes. Its cost depends on the number
//!   of classes, and it proves its answer or bounds its error.
//!
//! Nothing here knows what a weight means, and nothing here decides which edges exist.

mod classes;
mod exact;
/// The search of the published artifact; its parameters are what [`Exact`] changes. It exists
/// because the figures of `--compat muri` depend on which of several equal matchings it finds.
mod released;
#[cfg(test)]
mod tests;

pub use classes::{ClassMatcher, MAX_CLASSES, Pairing};
pub use exact::Exact;
pub use released::{MAX_VERTICES, Matcher, NONE};
