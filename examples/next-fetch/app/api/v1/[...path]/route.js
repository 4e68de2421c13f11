import { intake } from '../../../../shop.js'

const tickets = intake.fetchTickets()

export { tickets as DELETE, tickets as GET, tickets as POST }
