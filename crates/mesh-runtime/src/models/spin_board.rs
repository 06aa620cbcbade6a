use super::model;
use crate::spin_board::SpinBoard;
use crate::sync::Ordering;
use loom::thread::spawn;
use std::sync::Arc;

#[test]
fn loom_a_process_shows_itself_exactly_while_a_thread_of_it_runs() {
    model(3, || {
        let board = Arc::new(SpinBoard::create().unwrap());
        board.enter();
        let other = spawn({
            let board = Arc::clone(&board);
            move || {
                board.enter();
                board.leave();
                board.enter();
                board.leave();
            }
        });
        board.leave();
        board.enter();
        other.join().unwrap();
        assert!(board.shows());
        assert_eq!(board.page().active().load(Ordering::SeqCst), 1);
        board.leave();
        assert!(!board.shows());
        assert_eq!(board.page().active().load(Ordering::SeqCst), 0);
    });
}
