use roommate_core::allocation::program::{self, Kinds};
use roommate_core::allocation::{ByKind, Claim, Market};
fn main() {
    let args: Vec<String> = std::env::args().collect();
    for line in std::fs::read_to_string(&args[2]).unwrap().lines() {
        let v: serde_json::Value = serde_json::from_str(line).unwrap();
        let nums = |v: &serde_json::Value| -> ByKind { v.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect() };
        let claims: Vec<Claim> = v["claims"].as_array().unwrap().iter().map(|c| Claim {
            gpus: c["gpus"].as_f64().unwrap(), weight: 1.0, speed: nums(&c["speed"]), left: c["left"].as_f64().unwrap(),
            age_s: c["age"].as_f64().unwrap(), isolated_s: 0.0, deadline_s: None, team: 0 }).collect();
        let m = Market { gpus: nums(&v["gpus"]), claims };
        let t = std::time::Instant::now();
        let a = match args[1].as_str() {
            "sum" => program::throughput(&m, &ByKind::from_elem(1.0, m.gpus.len()), false, true),
            "min" => program::fair_released(&m, None),
            "span" => program::makespan_bisected(&m),
            "ftf" => program::finish_time(&m, Kinds::All),
            _ => panic!(),
        };
        let us = t.elapsed().as_micros();
        let Ok(a) = a else { println!("t {} unsolved", v["t"]); continue };
        let x: Vec<ByKind> = v["x"].as_array().unwrap().iter().map(nums).collect();
        let mut diff = 0.0_f64; let mut rel = 0.0_f64;
        for (o, f) in x.iter().flatten().zip(a.alone.iter().flatten()) { diff = diff.max((o - f).abs()); rel = rel.max((o-f).abs()/(o.max(1e-14))); }
        println!("t {} jobs {} value {:.9} max diff {diff:.1e} rel {rel:.1e} {us} us", v["t"], x.len(), a.value);
        if args.len() > 3 { for (o,f) in x.iter().zip(&a.alone) { println!("   {o:?} {f:?}"); } }
    }
}
