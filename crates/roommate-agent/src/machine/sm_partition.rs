//! Partitions: shares of a GPU become SM ranges that do not overlap.
//!
//! Tenants with a guaranteed share get ranges in the order of their job numbers, from the first SM
//! on; tenants without one share the rest. If more is guaranteed than exists, or nothing is left
//! for the rest, no tenant is confined: all run at once, and guards throttle tenants without a
//! guaranteed share.
//!
//! Ranges change in two steps: tenants whose range shrinks move first, and those whose range grows
//! wait until the SMs are free. The order of the ranges never changes, so no two tenants wait for
//! each other.

use crate::device::{GRAIN, SmGroups};
use crate::protocol::SmRange;

/// The smallest range: in smaller ones steps take very long, and libraries have no suitable
/// kernels.
pub(crate) const LEAST_SMS: u16 = 16;

/// What a tenant may use of a GPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Claim {
    /// Largest part of the GPU that it may use.
    pub(crate) share: f64,
    /// Whether that part is guaranteed.
    pub(crate) promised: bool,
}

/// A range for each tenant of a GPU, in the order of job numbers; `None` = the whole GPU.
pub(crate) fn ranges(
    SmGroups { groups, rest }: SmGroups,
    claims: &[Claim],
) -> Vec<Option<SmRange>> {
    let least = LEAST_SMS / GRAIN;
    let none = || vec![None; claims.len()];
    // Ends are rounded instead of lengths, so that rounding one range does not shrink the next.
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
    let range = |first: u16, count: u16| {
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
                range(first, end - first)
            } else {
                // Its user may limit it to less than what is left.
                let most = ((s.share * f64::from(groups)).round() as u16).max(least);
                let count = free.min(most);
                range(taken + (free - count), count)
            }
        })
        .collect()
}

/// Parts of the GPU to which tenants are confined that are held back, smallest first. In less than
/// the smallest one steps take so long that pauses disturb others less.
const LIMITS: [f64; 3] = [0.36, 0.5, 0.75];

/// The range and the pace in it of a tenant that may run at this part of its speed: the smallest
/// range in which it can, at the end of the GPU. `None` = it needs more than any of them.
pub(crate) fn limited(
    SmGroups { groups, rest }: SmGroups,
    permille: u16,
) -> Option<(SmRange, u16)> {
    let wanted = f64::from(permille) / 1000.0;
    let part = LIMITS.into_iter().find(|part| wanted <= *part)?;
    let count = ((part * f64::from(groups)).round() as u16).max(LEAST_SMS / GRAIN);
    if count >= groups {
        return None;
    }
    let range = SmRange { first: (groups - count) * GRAIN, sms: count * GRAIN + rest };
    Some((range, (1000.0 * wanted / part).round() as u16))
}

/// Whether two ranges have an SM in common.
pub(crate) fn overlap(a: SmRange, b: SmRange) -> bool {
    a.first < b.first + b.sms && b.first < a.first + a.sms
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: SmGroups = SmGroups { groups: 15, rest: 12 };

    #[test]
    fn who_is_held_back_gets_fewer_sms_and_then_pauses() {
        assert_eq!(limited(H200, 1000), None);
        let range = |first, sms| SmRange { first, sms };
        assert_eq!(limited(H200, 600), Some((range(32, 100), 800)));
        assert_eq!(limited(H200, 500), Some((range(56, 76), 1000)));
        assert_eq!(limited(H200, 90), Some((range(80, 52), 250)));
        assert_eq!(limited(H200, 0), Some((range(80, 52), 0)));
        assert_eq!(limited(SmGroups::default(), 100), None, "the GPU cannot be partitioned");
    }

    fn found(claims: &[(f64, bool)]) -> Vec<String> {
        let claims: Vec<Claim> = claims
            .iter()
            .map(|(share, promised)| Claim { share: *share, promised: *promised })
            .collect();
        let word =
            |s: Option<SmRange>| s.map_or("all".into(), |s| format!("{}+{}", s.first, s.sms));
        ranges(H200, &claims).into_iter().map(word).collect()
    }

    #[test]
    fn guaranteed_ranges_are_adjacent_and_guests_get_the_rest() {
        assert_eq!(found(&[(0.5, true), (0.5, true)]), ["0+64", "64+68"]);
        assert_eq!(found(&[(0.6, true), (1.0, false)]), ["0+72", "72+60"]);
        assert_eq!(found(&[(1.0, false), (0.6, true), (1.0, false)]), ["72+60", "0+72", "72+60"]);
        assert_eq!(found(&[(0.25, true), (0.25, true), (0.5, true)]), ["0+32", "32+32", "64+68"]);
        // The user limits a guest to less.
        assert_eq!(found(&[(0.5, true), (0.125, false)]), ["0+64", "104+28"]);
    }

    #[test]
    fn no_tenant_is_confined_without_room_for_all() {
        assert_eq!(found(&[(1.0, true)]), ["all"]);
        assert_eq!(found(&[(1.0, true), (1.0, false)]), ["all", "all"]);
        assert_eq!(found(&[(1.0, true), (1.0, true)]), ["all", "all"]);
        assert_eq!(found(&[(0.95, true), (1.0, false)]), ["all", "all"]);
        assert_eq!(found(&[(1.0, false), (1.0, false)]), ["all", "all"]);
        // Limited to half by its user, alone.
        assert_eq!(found(&[(0.5, true)]), ["0+64"]);
    }

    #[test]
    fn ranges_never_overlap_and_never_leave_the_gpu() {
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
                    let found: Vec<SmRange> = ranges(H200, &claims).into_iter().flatten().collect();
                    for (i, x) in found.iter().enumerate() {
                        assert!(x.first + x.sms <= 132 && x.sms >= LEAST_SMS, "{claims:?}: {x:?}");
                        assert!(found[i + 1..].iter().all(|y| !overlap(*x, *y)), "{claims:?}");
                    }
                }
            }
        }
    }
}
