//! Nothing is wrong here, though an uninstrumented standard library makes it look like races.
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

fn main() {
    for _ in 0..100 {
        let total = Arc::new(Mutex::new(0));
        let (sender, receiver) = mpsc::channel();
        let threads: Vec<_> = (0..4)
            .map(|i| {
                let (total, sender) = (total.clone(), sender.clone());
                thread::spawn(move || {
                    *total.lock().unwrap() += i;
                    sender.send(vec![i]).unwrap();
                })
            })
            .collect();
        drop(sender);
        assert_eq!(receiver.iter().flatten().sum::<i32>(), 6);
        drop(threads);
        assert!(Arc::into_inner(total).is_none_or(|total| total.into_inner().unwrap() == 6));
    }
}
