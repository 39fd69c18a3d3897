//! Who sits where on a GPU: shares become parts of its multiprocessors (SMs) that do not overlap.
//!
//! Whoever was promised a share sits in order of job numbers from the first SM on; those who were promised nothing
//! have what is left together. Where more was promised than there is, or nothing is left, nobody is confined: they
//! run at once, and guards hold back whom they have to.
//!
//! A seat changes in two steps: who shrinks goes first, and who grows waits until the place is free. The order of
//! the seats never changes, so nobody waits for one that waits for it.

use crate::device::{GRAIN, SmGroups};
use crate::protocol::SmRange;

/// The smallest seat: below it a step takes forever, and libraries have no plans that fit.
pub(crate) const LEAST_SMS: u16 = 16;

/// A tenant of a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Claim {
    /// Most of the GPU that it may use.
    pub(crate) share: f64,
    /// Whether that was promised to it.
    pub(crate) promised: bool,
}

/// A seat for each tenant of a GPU, in the order of their numbers; `None` = the whole GPU.
pub(crate) fn ranges(SmGroups { groups, rest }: SmGroups, claims: &[Claim]) -> Vec<Option<SmRange>> {
    let least = LEAST_SMS / GRAIN;
    let none = || vec![None; claims.len()];
    // Ends of the promised seats: rounding one must not take from the others.
    let (mut promised, mut taken) = (0.0, 0);
    let mut ends = Vec::new();
    for s in claims.iter().filter(|s| s.promised) {
        promised += s.share;
        taken = ((promised * f64::from(groups)).round() as u16).max(taken + least);
        ends.push(taken);
    }
    let free = groups.saturating_sub(taken);
    let guests = claims.iter().filter(|s| !s.promised).count();
    if promised > 1.0 + 1e-9 || taken > groups || (guests > 0 && free < least) {
        return none();
    }
    let seat = |first: u16, count: u16| {
        let more = if first + count == groups { rest } else { 0 };
        (count < groups).then_some(SmRange { first: first * GRAIN, sms: count * GRAIN + more })
    };
    let (mut ends, mut next) = (ends.into_iter(), 0);
    claims
        .iter()
        .map(|s| {
            if s.promised {
                let (first, end) = (next, ends.next().unwrap_or(taken));
                next = end;
                seat(first, end - first)
            } else {
                // Its user may hold it to less than what is left.
                let most = ((s.share * f64::from(groups)).round() as u16).max(least);
                let count = free.min(most);
                seat(taken + (free - count), count)
            }
        })
        .collect()
}

/// Whether two seats have an SM in common.
pub(crate) fn overlap(a: SmRange, b: SmRange) -> bool {
    a.first < b.first + b.sms && b.first < a.first + a.sms
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: SmGroups = SmGroups { groups: 15, rest: 12 };

    fn told(claims: &[(f64, bool)]) -> Vec<String> {
        let claims: Vec<Claim> = claims
            .iter()
            .map(|(share, promised)| Claim { share: *share, promised: *promised })
            .collect();
        let word = |s: Option<SmRange>| s.map_or("all".into(), |s| format!("{}+{}", s.first, s.sms));
        ranges(H200, &claims).into_iter().map(word).collect()
    }

    #[test]
    fn promises_sit_side_by_side_and_guests_have_the_rest() {
        assert_eq!(told(&[(0.5, true), (0.5, true)]), ["0+64", "64+68"]);
        assert_eq!(told(&[(0.6, true), (1.0, false)]), ["0+72", "72+60"]);
        assert_eq!(told(&[(1.0, false), (0.6, true), (1.0, false)]), ["72+60", "0+72", "72+60"]);
        assert_eq!(told(&[(0.25, true), (0.25, true), (0.5, true)]), ["0+32", "32+32", "64+68"]);
        // Its user holds a guest to less.
        assert_eq!(told(&[(0.5, true), (0.125, false)]), ["0+64", "104+28"]);
    }

    #[test]
    fn nobody_is_confined_where_there_is_no_rest() {
        assert_eq!(told(&[(1.0, true)]), ["all"]);
        assert_eq!(told(&[(1.0, true), (1.0, false)]), ["all", "all"]);
        assert_eq!(told(&[(1.0, true), (1.0, true)]), ["all", "all"]);
        assert_eq!(told(&[(0.95, true), (1.0, false)]), ["all", "all"]);
        assert_eq!(told(&[(1.0, false), (1.0, false)]), ["all", "all"]);
        // Held to a half by its user, alone.
        assert_eq!(told(&[(0.5, true)]), ["0+64"]);
    }

    #[test]
    fn seats_never_overlap_and_never_leave_the_gpu() {
        for a in 0..=20 {
            for b in 0..=20 {
                for guest in [false, true] {
                    let mut claims = vec![
                        Claim { share: f64::from(a) / 20.0, promised: true },
                        Claim { share: f64::from(b) / 20.0, promised: true },
                    ];
                    if guest {
                        claims.push(Claim { share: 1.0, promised: false });
                    }
                    let seats: Vec<SmRange> = ranges(H200, &claims).into_iter().flatten().collect();
                    for (i, x) in seats.iter().enumerate() {
                        assert!(x.first + x.sms <= 132 && x.sms >= LEAST_SMS, "{claims:?}: {x:?}");
                        assert!(seats[i + 1..].iter().all(|y| !overlap(*x, *y)), "{claims:?}");
                    }
                }
            }
        }
    }
}
